"""What all commands share: options, help, completion, tables and progress on a terminal."""
