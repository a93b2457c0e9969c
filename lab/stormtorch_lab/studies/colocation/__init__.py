"""A training and a service on the same links, in virtual time: speed-up of the service for loss of the training."""
