"""Attention kernels side by side: configurations, inputs, the oracle, errors and their causes."""
