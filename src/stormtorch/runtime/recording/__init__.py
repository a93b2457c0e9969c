"""How a rank records its steps: in memory, in a file, for Prometheus. Never holds up a training.

Begin with `recorder.py`; the schema is `stormtorch.telemetry.records`.
"""
