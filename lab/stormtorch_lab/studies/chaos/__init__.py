"""Chaos: a training on the hosts of a lab, whose processes and links fail by a seeded schedule, and a verdict."""
