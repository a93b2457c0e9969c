"""Data loading for elastic training: `ElasticSampler` divides samples among changing ranks.

Begin with `epoch_plan.py`.
"""
