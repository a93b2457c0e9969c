"""Exchanges over UDP: what a rank knows of its peers, their addresses and liveness, shared memory, and leaving."""
