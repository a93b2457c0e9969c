"""Data sets, read from files or from installed libraries."""
