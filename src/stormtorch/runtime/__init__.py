"""A policy on real ranks: what `stormtorch.prepare` builds around a model and its optimizer."""
