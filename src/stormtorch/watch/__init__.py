"""A running job as its records show it: cost of the network, bad links, who is waited for; terminal, page, Prometheus.

Used by `stormtorch watch` and by reports. Begin with `job.py` (records merged) and `verdict.py` (the diagnosis).
"""
