"""The lab's commands: functions that `app.py` adds to `stormtorch`, found by the entry point `stormtorch.commands`.

Begin with `app.py`. They check what was typed and show results; the work is done in the other packages.
"""
