"""Benchmarks of stormtorch against gloo, MPI and DDP in the same run; `stormtorch bench` is their command line.

Start with `suite.py`, which lists all of them, and `backends.py`, the compared backends.
"""
