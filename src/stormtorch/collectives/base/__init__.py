"""Base of all collectives: groups of ranks (communicators), reduce operations, tensors as memory spans, objects."""
