"""The trace: one SQLite file with everything a run said, written live and read live."""
