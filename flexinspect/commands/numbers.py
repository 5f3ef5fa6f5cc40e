"""Whole numbers read from flags, and refused there with a sentence."""

from __future__ import annotations

from argparse import ArgumentTypeError

MAX_THREADS = 1024
"""OpenMP makes as many as it is told, until the machine has none left for anybody."""


def positive_int(text: str) -> int:
    """Read a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def n_threads(text: str) -> int:
    """Read a number of CPU threads."""
    value = positive_int(text)
    if value > MAX_THREADS:
        raise ArgumentTypeError(f"{value} threads are more than {MAX_THREADS}")
    return value
