"""Sessions under an `OwnerPolicy`: gradients are reduced to the owners of shards, parameters broadcast from them.

Begin with `sharded.py`; `reduction.py` is stage 1, `broadcast.py` stage 2.
"""
