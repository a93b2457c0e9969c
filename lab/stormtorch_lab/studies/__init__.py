"""Trainings run side by side and compared, on real ranks or on virtual workers."""
