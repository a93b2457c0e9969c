"""Chaos tests: a training in a lab under a seeded schedule of process and network faults, with invariants checked."""
