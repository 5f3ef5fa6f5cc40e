"""Two runs: what is aligned with what, how far it may differ, and the first place where it does."""
