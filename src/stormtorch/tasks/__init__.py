"""What is trained: models, data, and tasks made of both."""
