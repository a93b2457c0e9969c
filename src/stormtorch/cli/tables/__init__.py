"""Results as tables: one module per command."""
