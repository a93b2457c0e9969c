"""`stormtorch bench`: one file for each kind of benchmark."""
