"""What every collective stands on: groups of ranks, reduce operations, tensors as spans of memory, and objects."""
