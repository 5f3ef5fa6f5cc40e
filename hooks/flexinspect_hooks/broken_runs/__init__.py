"""The museum's programs: small runs with one known fault each, and their repaired versions.

Each run is a function named after its catalog entry ("_" for "-"), in a module by subject. They are
written to be read: the fault is at most a few lines, and `repaired` shows which. What each of them
imitates and asks is in `flexinspect.inputs.broken_run_catalog`.
"""
