"""The debuggers by the names that people know: thin, typed doors onto the one engine.

`flexinspect_hooks.training` computes; here its results are named, kept in bounded histories,
logged, and counted.
"""
