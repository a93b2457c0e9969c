"""How a rank records its steps."""
