"""Exchanges between ranks: the seam, its two transports, and how ranks find each other."""
