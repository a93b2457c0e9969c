"""What studies train: models, data sets, and tasks made of both. Begin with `task.py`."""
