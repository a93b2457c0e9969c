"""GPU copies, the order in which collectives start, and the threads that complete futures."""
