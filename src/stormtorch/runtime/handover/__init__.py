"""Resharding and replication: moves owners' shards when members change; standbys (hot spares) replicate them before.

Begin with `moves.py` (the plan, numbers only), `transition.py` (the exchange) and `standby.py` (replication).
"""
