"""Diagnosis of a machine, and of the network between several: checks, measurements, culprits and remedies.

Used by the command `stormtorch doctor`. Begin with `director.py` (schedules the tests) and `verdict.py` (the
reasoning).
"""
