"""Networks, studies and benchmarks in which stormtorch is tried: nothing here is needed to train."""
