"""What every prepared model has: a session, hooks, buffers, rounds."""
