"""Integrations of `prepare` into training frameworks: one file per framework, which imports that framework.

For users; no other package imports this one.
"""
