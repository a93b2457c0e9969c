"""Benchmarks that measure stormtorch and its peers in the same run; `stormtorch bench` is their command line.

Begin with `suite.py`, which runs all of them, and `backends.py`, the contenders.
"""
