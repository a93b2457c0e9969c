"""Elastic membership of a session: views, barriers and collectives of all ranks, settings that must agree.

Begin with `membership.py`. `served_collectives.py` serves collectives of other ranks while a rank blocks.
"""
