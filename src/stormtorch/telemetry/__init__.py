"""What a step cost, as records in files: written by ranks, read by watch, ledger and postmortem."""
