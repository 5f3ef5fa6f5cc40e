"""The audit: the steps of a program compared with a reference, and faults that explain them."""
