"""Resharding: how an owner's state gets to others when members change, and standbys, which replicate it before.

Begin with `moves.py` (the plan, numbers only), `transition.py` (the exchange) and `standby.py`.
"""
