"""Records of all ranks merged to one job, and shown: what the network costs, which link is bad, who is waited for."""
