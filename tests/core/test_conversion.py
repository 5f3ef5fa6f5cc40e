"""Plain data of another form than the type's is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct

from flexinspect.core.conversion import convert
from flexinspect.core.errors import UsageError


class Place(Struct, forbid_unknown_fields=True):
    step: int
    layer: int = 0


def test_data_of_the_right_form_is_converted() -> None:
    assert convert(Place, {"step": 3}, "The place") == Place(3)


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ({"step": 1, "": 2}, "The place is not valid: Object contains unknown field ``", ""),
        (
            {"step": 1, "lyer": 2},
            "Object contains unknown field `lyer` (known: step, layer)",
            "layer",
        ),
        ({"step": "x"}, "The place is not valid in step: Expected `int`, got `str`", ""),
    ],
)
def test_another_form_is_refused_with_the_field(data: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        convert(Place, data, "The place")
    assert message in str(refused.value)
    found = refused.value.hint or ""
    assert hint in found
    assert bool(found) == bool(hint)
