"""What ranks agree on beside the parameters: members, turns, calls, settings."""
