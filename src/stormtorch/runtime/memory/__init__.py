"""Memory of parameters, gradients and optimizer state: flat buckets, their layout, shards and fingerprints.

The bottom layer of the runtime. Begin with `layout.py` (numbers only) and `bucket.py` (the memory).
"""
