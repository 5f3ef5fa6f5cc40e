"""Programs with public silent training errors, and without: see `runner`."""
