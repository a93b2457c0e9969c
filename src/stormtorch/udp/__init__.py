"""The transport over UDP: what ranks publish of themselves, addresses, liveness, shared memory, shutdown.

Used by `joining`, which makes transports; others know only the seam in `stormtorch.exchange`. Begin with `udp.py`.
"""
