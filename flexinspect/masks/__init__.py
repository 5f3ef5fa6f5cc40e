"""Masks in numpy: presets, edits, one attention row, and counts and views of large masks."""
