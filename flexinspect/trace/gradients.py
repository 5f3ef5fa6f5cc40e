"""Reading the gradients of generated tokens. Every function raises `TraceError` for damage."""

from __future__ import annotations

from collections.abc import Iterator

from flexinspect.gradientrecords import GradientRecord
from flexinspect.trace import decode, schema
from flexinspect.trace.queries import WHERE_BRANCH, WHERE_STEP
from flexinspect.trace.reader import TraceReader

_TABLE_EXISTS_SQL = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?"
_GRADIENT_ARRAYS_SQL = "AND owner IS NULL AND stream IN ('grads.tokens', 'grads.layers')"


def has_gradient_tables(reader: TraceReader) -> bool:
    """Tell whether a trace has the tables of gradients; early ones of version 1 have not."""
    return bool(reader._query_int(_TABLE_EXISTS_SQL, (schema.GRADIENTS.name,)))


def read_gradients(
    reader: TraceReader, generation: int, step: int, branch: int = 0
) -> GradientRecord | None:
    """Return the gradients of the token that a step generated, None when there are none."""
    key = (generation, branch, step)
    rows = reader._select(schema.GRADIENTS, WHERE_STEP, key) if has_gradient_tables(reader) else []
    if not rows:
        return None
    stats = reader._records(
        decode.decode_gradient_stat, schema.GRADS, f"{WHERE_STEP} ORDER BY layer, name", key, skip=3
    )
    found = {
        record.stream: record.array for record in reader._arrays(key, _GRADIENT_ARRAYS_SQL, ())
    }
    return reader._decode(lambda row: decode.decode_gradients(row, tuple(stats), found), rows[0])


def steps_with_gradients(reader: TraceReader, generation: int, branch: int = 0) -> list[int]:
    """Return the steps of a branch whose tokens have gradients, in order."""
    if not has_gradient_tables(reader):
        return []
    sql = f"SELECT step FROM gradients {WHERE_BRANCH} ORDER BY step"
    return [int(step) for (step,) in reader._query(sql, (generation, branch))]


def read_all_gradients(
    reader: TraceReader, generation: int, branch: int = 0
) -> Iterator[GradientRecord]:
    """Yield the gradients of a branch, step by step."""
    for step in steps_with_gradients(reader, generation, branch):
        record = read_gradients(reader, generation, step, branch)
        if record is not None:
            yield record
