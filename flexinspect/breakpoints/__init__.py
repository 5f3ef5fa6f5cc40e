"""Breakpoints on what the model does: an expression language, and the store of a run's breakpoints.

Expressions are parsed here and evaluated on records; they never run as Python. No torch, no files.
"""
