"""Any number of virtual workers in one process."""
