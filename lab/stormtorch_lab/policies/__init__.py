"""Policies for federated training, and policies by name, as commands take them."""
