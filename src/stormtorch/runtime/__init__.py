"""The training runtime: what `stormtorch.prepare` builds around a model and its optimizer to run a policy.

Begin with `prepare.py`, then `session/session.py` and `owner/sharded.py`, where `_finish` to `_passed` is one step.
"""
