"""Whether a finished answer is one of those expected: compared once, as it may be very long."""

from __future__ import annotations

from collections.abc import Sequence

from flexinspect.answers import is_correct_answer
from flexinspect.panels.source import Source


def is_answer_correct(
    source: Source, branch: tuple[int, int], state: str, answer: str, expected: Sequence[str]
) -> bool | None:
    """Return whether the answer of (generation, branch) is right.

    None while it is not known: nothing was expected, or the branch is still recorded.
    """
    if not expected or state == "recording":
        return None
    key = ("right", *branch, state)
    return source.get_or_create(key, lambda: is_correct_answer(answer, expected), lambda _: 64)
