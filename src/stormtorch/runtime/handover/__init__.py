"""How an owner's state gets to others when members change."""
