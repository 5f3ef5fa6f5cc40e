"""The sentence of a reproduced fault says which other faults give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from flexinspect.rules.numerics.audit_findings import _reproduced

DATA = {"layer": 2, "step": 0, "batch": 0, "difference": 1.0}
FOUND: dict[str, Any] = {
    "sentences": ["without RoPE"],
    "layers": [2],
    "difference": 1e-7,
    "agree": 3,
    "total": 3,
    "later": 2,
    "n_later": 2,
}


@pytest.mark.parametrize(
    ("ties", "end"),
    [
        (None, "So are those of the 2 later steps."),
        ([], "So are those of the 2 later steps."),
        (["a"], "It is one of 2 faults that give these numbers: a forward a gives them, too."),
        (
            [*"abcd"],
            "one of 5 faults that give these numbers: a forward a, or b, or c, … gives them, too.",
        ),
    ],
    ids=["an earlier trace", "none", "one", "four"],
)
def test_ties_are_told(ties: list[str] | None, end: str) -> None:
    found = FOUND if ties is None else FOUND | {"ties": ties}
    assert _reproduced(DATA, found).endswith(end)
