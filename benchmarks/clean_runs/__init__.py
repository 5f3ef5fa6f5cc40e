"""Correct generations of many kinds, none of which may get an error or a warning: see `runner`."""
