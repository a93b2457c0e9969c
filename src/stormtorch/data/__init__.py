"""Which samples a rank reads when ranks come and go."""
