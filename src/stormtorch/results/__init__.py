"""Common parts of results: statistics, texts, surroundings, progress, reports."""
