"""`prepare` inside training frameworks: one file per framework, which imports the framework when it is imported.

Nothing inside imports this package; users do.
"""
