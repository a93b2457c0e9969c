"""What every prepared model has, whatever its policy: hooks, the parameter barrier, buffers, reports of a round.

Begin with `session.py`, which the hooks of `hooks.py` drive.
"""
