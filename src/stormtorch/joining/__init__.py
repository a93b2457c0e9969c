"""How a process joins a job: rendezvous, start, late join, restart, and requests of processes outside the job.

Used by the backend and by `stormtorch.connect`. Begin with `rendezvous.py`; `join_client.py` and `admission.py` are the
two sides of a late join.
"""
