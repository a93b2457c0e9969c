"""Where parameters, gradients and optimizer state lie: flat buckets, their layout, shards and fingerprints.

The bottom of the runtime: no network. Begin with `layout.py` (numbers only) and `bucket.py` (the memory).
"""
