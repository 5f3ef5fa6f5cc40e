"""Commands to a running capture: what is said, who says it, and where captures are found."""
