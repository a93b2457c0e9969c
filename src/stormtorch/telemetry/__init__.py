"""Records of steps: their schema, files, metrics and statistics. Ranks write them; watch, ledger and postmortem read.

Nothing here knows a training or a network. Begin with `records.py`.
"""
