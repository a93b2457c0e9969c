"""Benchmarks that measure stormtorch and its peers in the same run; `stormtorch bench` is their command line."""
