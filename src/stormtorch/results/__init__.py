"""What results have in common: statistics, texts, surroundings, progress."""
