"""Dumps of other tools as traces: what they do not hold is marked as unknown."""
