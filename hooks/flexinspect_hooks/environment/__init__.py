"""Facts about torch on this machine, found in a process of their own: an install may be broken."""
