"""Step records: schema, files, metrics and statistics. Ranks write them; watch, ledger and postmortem read them.

Independent of trainings and networks. Begin with `records.py`.
"""
