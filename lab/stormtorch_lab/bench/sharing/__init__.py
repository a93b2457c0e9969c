"""Benchmark of fairness and congestion control: how the engine shares a link with TCP and other flows."""
