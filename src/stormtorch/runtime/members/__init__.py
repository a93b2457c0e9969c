"""Who trains together: a session's place in the views, calls that all ranks must make, settings that must agree.

Begin with `membership.py`; `calls.py` serves the collective calls of others while a rank waits.
"""
