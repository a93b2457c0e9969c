"""Interface between collectives and transports: plans, exchanges and their results; options; a simulated network.

Used by the collectives and everything above; knows no socket. Begin with `exchange.py`.
"""
