"""A policy on real ranks: what `stormtorch.prepare` builds around a model and its optimizer.

Begin with `prepare.py`, then `session/session.py` and `owner/sharded.py`, whose `_finish` to `_passed` is one step.
"""
