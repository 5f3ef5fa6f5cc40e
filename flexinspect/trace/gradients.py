"""Reading the gradients of generated tokens. Every function raises `TraceError` for damage."""

from __future__ import annotations

from collections.abc import Iterator

from flexinspect.gradientrecords import GradientRecord
from flexinspect.trace import decode, schema
from flexinspect.trace.queries import BRANCH, STEP
from flexinspect.trace.reader import TraceReader

_KNOWS = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?"
_WIDE = "AND owner IS NULL AND stream IN ('grads.tokens', 'grads.layers')"


def knows_gradients(reader: TraceReader) -> bool:
    """Tell whether a trace has the tables of gradients; early ones of version 1 have not."""
    return bool(reader._number(_KNOWS, (schema.GRADIENTS.name,)))


def gradients_of(
    reader: TraceReader, generation: int, step: int, branch: int = 0
) -> GradientRecord | None:
    """Return the gradients of the token that a step generated, None when there are none."""
    key = (generation, branch, step)
    rows = reader._select(schema.GRADIENTS, STEP, key) if knows_gradients(reader) else []
    if not rows:
        return None
    stats = reader._records(
        decode.gradient_stat, schema.GRADS, f"{STEP} ORDER BY layer, name", key, skip=3
    )
    found = {record.stream: record.array for record in reader._arrays(key, _WIDE, ())}
    return reader._guard(lambda row: decode.gradients(row, tuple(stats), found), rows[0])


def steps_with_gradients(reader: TraceReader, generation: int, branch: int = 0) -> list[int]:
    """Return the steps of a branch whose tokens have gradients, in order."""
    if not knows_gradients(reader):
        return []
    sql = f"SELECT step FROM gradients {BRANCH} ORDER BY step"
    return [int(step) for (step,) in reader._query(sql, (generation, branch))]


def all_gradients(
    reader: TraceReader, generation: int, branch: int = 0
) -> Iterator[GradientRecord]:
    """Yield the gradients of a branch, step by step."""
    for step in steps_with_gradients(reader, generation, branch):
        record = gradients_of(reader, generation, step, branch)
        if record is not None:
            yield record
