"""The command `stormtorch`: checks arguments, shows progress and tables; other packages do the work.

The only package that imports typer, rich and matplotlib; no other package imports it. Begin with `app.py`.
"""
