"""Rank policies on real ranks: models or gradients averaged among ranks."""
