"""Rewind a running generation: restore a step, fork with another token, or edit the mask."""
