"""Terminal interface shared by all commands: options, help, completion, tables and progress."""
