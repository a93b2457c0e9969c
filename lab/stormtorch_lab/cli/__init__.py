"""The lab's commands, which `stormtorch` finds by entry points."""
