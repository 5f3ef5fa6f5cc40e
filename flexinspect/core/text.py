"""Text for terminals and messages: escaping, plurals, ranges of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()
        for char in text
    )


def ensure_printable(text: str) -> str:
    """Escape text that its maker should have escaped; backslashes of printable text stay."""
    return text if text.isprintable() else escape_unprintable(text)


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


def print_message(text: str) -> None:
    """Print a message of flexinspect on stderr."""
    print(f"flexinspect: {text}", file=sys.stderr)


def truncate(text: str, n: int) -> str:
    """Return text of at most `n` characters, cut with "…" where it is longer."""
    return text if len(text) <= n else text[: n - 1].rstrip() + "…"


def plural(n: int, what: str) -> str:
    """Return `1 row` or `12 rows`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


MIN_PART, MAX_SUGGESTIONS = 3, 4  # letters of a part of a word, and words that are suggested


def did_you_mean(word: str, known: Iterable[str], default: str = "") -> str:
    """Return `Did you mean X?` with the nearest known word, or `default` if none is near.

    Without one, these are the first words of which it is a part, such as the beginning.
    """
    import difflib  # only for errors

    words = list(known)
    near = difflib.get_close_matches(word, words, 1)
    if not near and len(word) >= MIN_PART:
        near = [one for one in words if word in one][:MAX_SUGGESTIONS]
    return f"Did you mean {' or '.join(near)}?" if near else default


def is_or_are(n: int) -> str:
    """Return `is` for 1, `are` for any other number."""
    return "is" if n == 1 else "are"


def capitalize(text: str) -> str:
    """Return text with a capital first letter; the rest stays, unlike with `str.capitalize`."""
    return text[:1].upper() + text[1:]


def join_labels(labels: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    *first, last = labels
    return f"{', '.join(first)} and {last}" if first else last


def limit_positions(positions: Positions) -> tuple[int, ...]:
    """Return the first `MAX_LISTED_POSITIONS` positions."""
    return tuple(positions[:MAX_LISTED_POSITIONS].tolist())


def format_ranges(values: Iterable[int]) -> str:
    """Return numbers in any order as `0-3, 5`: ascending, each once."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_share(value: float) -> str:
    """Return a share of 1 with four decimals, "<0.0001" for a smaller one."""
    return "<0.0001" if 0 < value < 1e-4 else f"{value:.4f}" if value else "0"


def format_numbers(what: str, numbers: Sequence[int]) -> str:
    """Return `head 3` or `heads 0-2, 5`, numbers ascending."""
    return f"{what}{'' if len(numbers) == 1 else 's'} {format_ranges(numbers)}"


def format_ids(ids: Sequence[int]) -> str:
    """Return `id 3` or `ids 7, 2`: token ids, in the order of the text."""
    return f"{'id' if len(ids) == 1 else 'ids'} {', '.join(map(str, ids))}"


def format_layers(which: Sequence[int], n_layers: int) -> str:
    """Return `layer 3`, `layers 0-2, 5`, or `all 8 layers` when the model has `n_layers`."""
    if len(which) == n_layers > 1:
        return f"all {n_layers} layers"
    return format_numbers("layer", sorted(which))
