"""Which chunks arrive: loss models of many links at once, parity, and repair."""
