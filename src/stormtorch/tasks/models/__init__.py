"""Models in plain torch."""
