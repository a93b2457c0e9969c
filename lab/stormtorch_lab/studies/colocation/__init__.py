"""A training and a service on the same lines, in virtual time: what the service gains if the training waits for it."""
