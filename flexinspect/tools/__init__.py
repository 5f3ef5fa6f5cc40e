"""Modules that are run by name, with `python -m flexinspect.tools.NAME`."""
