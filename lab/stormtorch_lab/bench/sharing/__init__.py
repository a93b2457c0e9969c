"""Benchmark of fairness: what the engine leaves to TCP and to others on a link that they share."""
