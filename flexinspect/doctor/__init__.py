"""Checks of the machine and its packages: what `flexinspect doctor` prints."""
