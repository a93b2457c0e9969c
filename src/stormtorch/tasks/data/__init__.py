"""Data sets, read from files or made here."""
