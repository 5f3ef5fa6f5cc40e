"""Benchmarks: ratios measured in one run, interleaved, medians, JSON out. See README.md."""
