"""Comparing a generated answer with those a dataset expects."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def is_correct_answer(answer: str, expected: Iterable[str]) -> bool:
    """Say whether an answer equals one of those expected: exact match but for case and spaces."""
    mine = _normalize(answer)
    return any(mine == _normalize(other) for other in expected)


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().strip(" .").split())
