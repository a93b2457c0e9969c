"""What the commands of the lab share: options, their values, charts."""
