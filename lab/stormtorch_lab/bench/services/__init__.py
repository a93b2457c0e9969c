"""Benchmark of a web service and a training that share the links of a lab."""
