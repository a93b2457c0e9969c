"""Where parameters, gradients and optimizer state lie: buckets, their layout, shards and fingerprints."""
