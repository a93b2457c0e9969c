"""Shared by the commands of the lab: options, their values, terminal charts."""
