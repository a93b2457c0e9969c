"""Parameters of virtual workers: chunks of a model, stale replicas without copies, personal parts, rounding."""
