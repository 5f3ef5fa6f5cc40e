"""Large masks as packed bits: counted once in tiles, folded into windows of any scale."""
