"""The seam between what trains and what carries it: exchanges, their options, and a network in memory beside the real one."""
