"""Sessions under a `RankPolicy`: every rank runs the optimizer, and models or gradients are averaged.

Begin with `replicated.py`; `averages.py` has both stages of an exchange.
"""
