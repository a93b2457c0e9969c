"""Training on n virtual workers of one device: only the network between them is simulated."""
