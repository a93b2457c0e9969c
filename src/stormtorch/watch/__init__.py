"""Watching a job: what the records of all its ranks say together."""
