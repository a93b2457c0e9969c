"""Processes that work together, here or on the hosts of a lab."""
