"""The order in which collectives begin, copies between a GPU and main memory, and threads that complete futures."""
