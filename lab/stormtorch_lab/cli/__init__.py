"""The lab's commands: functions that `app.py` adds to `stormtorch`, found by the entry point `stormtorch.commands`.

Begin with `app.py`. They parse and check options and show results; the other packages do the work.
"""
