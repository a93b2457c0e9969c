"""Replicated sessions under a `RankPolicy` (as DDP, local SGD): every rank runs the optimizer on its own model.

Begin with `replicated.py`; `averages.py` has both stages of an exchange.
"""
