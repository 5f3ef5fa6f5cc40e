"""The reference: an untouched copy of the architecture, and what it needs to run the steps."""
