"""Which samples a rank reads while ranks join and leave: `ElasticSampler`. Begin with `epoch_plan.py`, numbers only."""
