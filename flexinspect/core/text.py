"""Text for terminals and messages: escaping, plurals, ranges of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the command line imports this module, and need not load numpy
    import numpy as np
    import numpy.typing as npt


def escape_unprintable(text: str) -> str:
    """Return `text` with non-printable characters and backslashes escaped as in Python.

    Text from a model then cannot move the cursor, colour the screen or end a line.
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    if char.isprintable() and char != "\\":
        return char
    return char.encode("unicode_escape").decode()


Positions: TypeAlias = "npt.NDArray[np.intp]"

MAX_LISTED_POSITIONS = 32
"""Positions that a finding lists; its sentence and evidence count all of them."""

_CONTROL_SIGNS = {"\n": "↵", "\t": "⇥"}


def printable(text: str) -> str:
    """Return text of a model for a sentence, on one line.

    It adds no backslashes, because the whole sentence is escaped again where it is displayed.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else _CONTROL_SIGNS.get(c, f"<U+{ord(c):04X}>") for c in text
    )


def plural(n: int, what: str) -> str:
    """Return `1 row` or `12 rows`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def limit_positions(positions: Positions) -> tuple[int, ...]:
    """Return the first `MAX_LISTED_POSITIONS` positions."""
    return tuple(positions[:MAX_LISTED_POSITIONS].tolist())


def format_ranges(values: Sequence[int]) -> str:
    """Return ascending numbers as `0-3, 5`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_layers(which: Sequence[int], n_layers: int) -> str:
    """Return `layer 3`, `layers 0-2, 5`, or `all 8 layers` when the model has `n_layers`."""
    if len(which) == 1:
        return f"layer {which[0]}"
    if len(which) == n_layers:
        return f"all {n_layers} layers"
    return f"layers {format_ranges(sorted(which))}"
