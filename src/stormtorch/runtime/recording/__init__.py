"""Step records of a rank: in memory, in a file, as Prometheus metrics. Recording never delays training.

Begin with `recorder.py`; the schema is in `stormtorch.telemetry.records`.
"""
