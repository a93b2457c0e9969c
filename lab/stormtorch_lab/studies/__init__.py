"""Comparisons of trainings under several policies, on ranks (`on_ranks.py`) or on virtual workers (`on_workers.py`).

Start with `settings.py`: the settings of a study.
"""
