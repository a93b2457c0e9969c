"""The doctor: what is wrong with this machine, or with the network between several, and what to do about it."""
