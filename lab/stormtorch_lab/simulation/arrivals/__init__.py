"""Arrival masks of chunks: loss models of many links at once, forward error correction, and retransmission."""
