"""Turns arrays and strings into strips of terminal cells; imports no records and no trace."""
