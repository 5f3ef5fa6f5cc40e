"""How long the tests wait for something on a busy machine."""

PATIENCE_S = 120.0
"""Seconds after which a test gives up what takes a fraction of one, or a process that starts."""
