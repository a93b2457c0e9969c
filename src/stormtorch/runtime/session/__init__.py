"""Sessions of prepared models, independent of the policy: hooks, parameter barrier, buffers, reports, drift, losses.

Begin with `session.py`; the hooks in `hooks.py` call it from the user's training loop.
"""
