"""What networks do to datagrams: loss, faults, and the units they are given in."""
