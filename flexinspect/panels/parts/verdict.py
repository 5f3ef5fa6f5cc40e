"""Whether a finished answer is one of those expected: compared once, as it may be very long."""

from __future__ import annotations

from collections.abc import Sequence

from flexinspect.answers import matches
from flexinspect.panels.source import Source


def is_right(
    source: Source, branch: tuple[int, int], state: str, answer: str, expected: Sequence[str]
) -> bool | None:
    """Return whether the answer of (generation, branch) is right.

    None while it is not known: nothing was expected, or the branch is still recorded.
    """
    if not expected or state == "recording":
        return None
    key = ("right", *branch, state)
    return source.keep(key, lambda: matches(answer, expected), lambda _: 64)
