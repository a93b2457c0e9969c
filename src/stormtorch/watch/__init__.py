"""Monitoring of a job from its step records: network cost, bad links, stragglers; for terminal, page and Prometheus.

Used by `stormtorch watch` and by reports. Begin with `job.py` (records merged) and `verdict.py` (the diagnosis).
"""
