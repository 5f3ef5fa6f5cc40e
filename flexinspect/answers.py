"""Comparing a generated answer with those a dataset expects."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def matches(answer: str, expected: Iterable[str]) -> bool:
    """Say whether an answer equals one of those expected: exact match but for case and spaces."""
    mine = _normal(answer)
    return any(mine == _normal(other) for other in expected)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().strip(" .").split())
