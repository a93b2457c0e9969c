"""How a process enters a job: rendezvous, start, late join, restart, and requests of processes outside the job.

Used by the backend and by `stormtorch.connect`. Begin with `rendezvous.py`; `newcomer.py` and `reception.py` are both
sides of a late join.
"""
