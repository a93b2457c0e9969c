"""Launches the ranks of a job as processes, on this machine or on the hosts of a lab, and always ends them.

Used by studies, benchmarks and tests. Start with `ranks.py`.
"""
