"""The seam between what trains and what carries it: plan, exchange, arrival; options; a network in virtual time.

Used by the collectives and everything above; knows no socket. Begin with `exchange.py`.
"""
