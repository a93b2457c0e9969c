"""Network models: packet loss, fault injection, link files, and units of rates, sizes and times.

Models only, which any other package may use. Begin with `loss.py`.
"""
