"""The arrays of a few streams over many steps, read in one query."""

from __future__ import annotations

from collections.abc import Sequence

from flexinspect.records.step import Array
from flexinspect.trace.reader import TraceReader, read_arrays
from flexinspect.trace.schema import OPEN_END, WHERE_STEPS


def arrays_by_step(
    reader: TraceReader,
    generation: int,
    streams: Sequence[str],
    start: int = 0,
    stop: int | None = None,
    branch: int = 0,
) -> dict[int, dict[str, Array]]:
    """Return the arrays of the steps `start <= step < stop` by step and stream.

    The streams must have one array per step. Raises `TraceError`.
    """
    marks = ", ".join("?" * len(streams))
    where = f"{WHERE_STEPS} AND owner IS NULL AND stream IN ({marks})"
    place = (generation, branch, start, OPEN_END if stop is None else stop)
    found: dict[int, dict[str, Array]] = {}
    for step, _, record in read_arrays(reader, generation, where, (*place, *streams)):
        found.setdefault(step, {})[record.stream] = record.array
    return found
