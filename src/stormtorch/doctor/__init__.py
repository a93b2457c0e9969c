"""Diagnosis of a machine, and of the network between several: checks, measurements, a culprit and a remedy.

Used by the command `stormtorch doctor`. Begin with `director.py`, who measures whom, and `verdict.py`, the reasoning.
"""
