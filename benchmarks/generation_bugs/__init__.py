"""Programs that generate text with a silent error, and the same without it: see `runner`."""
