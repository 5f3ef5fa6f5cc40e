"""Comparing two runs step by step: what differs first, and where the difference comes from."""
