"""Invariants that are learnt from traces of good runs, and runs that are judged by them."""
