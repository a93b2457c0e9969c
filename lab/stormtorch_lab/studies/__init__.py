"""Trainings run side by side and compared, on real ranks (`on_ranks.py`) or on virtual workers (`on_workers.py`).

Begin with `settings.py`: what a study may vary.
"""
