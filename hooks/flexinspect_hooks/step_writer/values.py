"""The reduced values of one step, by name: arrays that observers put, and records are made of."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.records.step import Array

Values = Mapping[str, Array]

ACTIVATION_PREFIX, BFLOAT16 = "store/", "bfloat16/"

MODIFIED = "tensors-modified"
"""The value of a reduction whose tensors were modified before, and the event that reports it."""


def with_prefix(values: Values, prefix: str) -> dict[str, Array]:
    """Return the values whose names begin with `prefix`, by the rest of their names."""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values[name] for name in names}
