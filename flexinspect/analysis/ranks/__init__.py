"""The traces of the ranks of one distributed run: which belong together, and what differs."""
