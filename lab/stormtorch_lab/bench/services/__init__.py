"""Benchmark of a web service and a training that share the lines of a lab."""
