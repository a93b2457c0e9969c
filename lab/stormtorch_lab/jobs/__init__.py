"""Processes that work together as the ranks of a job, here or on the hosts of a lab; none is left behind.

Used by studies, benchmarks and tests. Begin with `ranks.py`.
"""
