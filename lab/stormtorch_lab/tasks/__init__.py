"""Models, data sets, and tasks made of both."""
