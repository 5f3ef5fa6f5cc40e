"""Flags that several commands share."""

from __future__ import annotations

import os
import re
from argparse import Action, ArgumentTypeError
from contextlib import suppress
from typing import Any

from flexinspect.core import low_bandwidth

MAX_INT = 2**63 - 1  # of SQLite, and of seeds in torch
MAX_THREADS = 1024  # OpenMP would create more, until the system runs out


def add_switches(group: Any, **switches: str) -> None:
    """Add flags that take no value to a parser or a group of it, each with its help."""
    for name, text in switches.items():
        group.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)


def add_low_bandwidth_flag(group: Any) -> None:
    """Add --low-bandwidth, whose effect begins when it is parsed."""
    text = "256 colours and fewer frames; automatic on a slow SSH connection (docs/remote.md)"
    group.add_argument("--low-bandwidth", action=_SaveOutput, nargs=0, help=text)


class _SaveOutput(Action):
    def __call__(self, *_: object) -> None:
        os.environ[low_bandwidth.VARIABLE] = "1"


def add_number_flags(parser: Any, **flags: str) -> None:
    """Add flags that take a number from 0 on to a parser or a group of it, each with its help."""
    for name, text in flags.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", type=non_negative_int, help=text
        )


def positive_int(text: str) -> int:
    """Return a whole number above 0. Raises `ArgumentTypeError`."""
    with suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise ArgumentTypeError(f"{text!r} is not a whole number above 0")


MIN_TRACE_BYTES = 1_000_000
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def trace_size(text: str) -> int:
    """Return a size as "500MB" or "2GiB" in bytes. Raises `ArgumentTypeError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < MIN_TRACE_BYTES:
        raise ArgumentTypeError(f"{text!r} is too small: a trace needs 1 MB at least")
    return size


def n_threads(text: str) -> int:
    """Return a number of CPU threads. Raises `ArgumentTypeError`."""
    value = positive_int(text)
    if value > MAX_THREADS:
        raise ArgumentTypeError(f"{value} threads are more than {MAX_THREADS}")
    return value


def non_negative_int(text: str) -> int:
    """Return a whole number that is 0 or greater. Raises `ArgumentTypeError`."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number that is 0 or greater")
    if int(text) > MAX_INT:
        raise ArgumentTypeError(f"{text} is above {MAX_INT}")
    return int(text)
