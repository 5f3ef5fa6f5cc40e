"""Programs that fill, shorten, reorder or assemble their caches: what was in them."""
