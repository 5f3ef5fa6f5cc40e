"""Drawing only: arrays and strings in, strips of terminal cells out. Knows no records, no trace."""
