"""Plots of results, with matplotlib."""
