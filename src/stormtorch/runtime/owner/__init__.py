"""Sessions with a sharded optimizer (ZeRO, FSDP) under an `OwnerPolicy`.

Gradients are reduced to the owner of each shard; owners step and broadcast the new parameters. Begin with `sharded.py`;
`gradient_reduction.py` is stage 1 (reduce-scatter), `parameter_broadcast.py` stage 2 (all-gather).
"""
