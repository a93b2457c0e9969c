"""The command `stormtorch`: checks what was typed, shows progress and tables; the work is done elsewhere.

The only package that knows typer, rich and matplotlib; nothing imports it. Begin with `app.py`.
"""
