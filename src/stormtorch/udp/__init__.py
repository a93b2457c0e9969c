"""Transport over UDP: published cards, addresses, NAT traversal, liveness, shared memory, shutdown.

`joining` makes the transports. Other packages use only the interface in `stormtorch.exchange`. Begin with `udp.py`.
"""
