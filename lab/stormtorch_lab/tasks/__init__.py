"""Training tasks of the studies: models, data sets, and tasks made of both. Start with `task.py`."""
