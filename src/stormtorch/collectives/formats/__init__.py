"""Gradient compression: number formats on the network in place of float32, int8 and int4 by block, and sparse codes."""
