"""The museum: small programs with one known fault each, and their repaired twins.

A module per exhibit, named as the exhibit is, with a function `run(stage, repaired=...)`. They are
written to be read: what is wrong is at most a few lines, and `repaired` says which. What each of
them imitates and asks is in `flexinspect.inputs.broken_run_catalog`.
"""
