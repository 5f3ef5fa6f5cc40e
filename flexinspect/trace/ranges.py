"""Questions about a range of steps, for strips and timelines: one query each, bounded.

A branch is read with the steps of its parents before the fork, so that a range has no holes. Every
function raises `TraceError` when the file is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flexinspect.records import LayerStatRecord, MemoryRecord
from flexinspect.trace import decode, schema
from flexinspect.trace.callranges import lineage
from flexinspect.trace.queries import WHERE_BRANCH
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import StepRow

Statistic = Literal["norm", "max", "mean", "std", "bad"]
"""A column of the layer statistics: "max" is the largest absolute value, "bad" counts NaN and Inf.
"""

MAX_STAT_ROWS = 1 << 16
"""Rows of layer statistics that one question returns at most."""

_STEP_RANGE_SQL = f"{WHERE_BRANCH} AND step >= ? AND step < ?"
_STATISTIC_SQL: dict[Statistic, str] = {
    "norm": "norm",
    "max": "max(abs(min), abs(max))",  # NULL, which stands for NaN, if either is
    "mean": "mean",
    "std": "std",
    "bad": "CAST(n_nan + n_inf AS REAL)",
}


@dataclass(frozen=True, slots=True)
class StatCell:
    """One value of one module in one step; `n_bad` are the NaN and Inf among its values."""

    step: int
    layer: int
    module: str
    value: float
    n_bad: int


@dataclass(frozen=True, slots=True)
class NonfiniteOutput:
    """A module's output that holds NaN or Inf, and its step."""

    step: int
    stat: LayerStatRecord


def branch_of_step(reader: TraceReader, generation: int, step: int, branch: int = 0) -> int:
    """Return the branch that holds a step: `branch`, or a parent before the fork."""
    for number, first, _ in lineage(reader, generation, branch):
        if step >= first:
            return number
    return branch


def step_bounds(reader: TraceReader, generation: int, branch: int = 0) -> tuple[int, int] | None:
    """Return the first and the last step recorded so far, parents included; None without any."""
    last = newest_step(reader, generation, branch)
    if last is None:
        return None
    family = lineage(reader, generation, branch)
    sql = f"SELECT step FROM steps {WHERE_BRANCH} ORDER BY step LIMIT 1"
    rows = reader._query(sql, (generation, family[-1][0]))
    return (int(rows[0][0]) if rows else last), last


def newest_step(reader: TraceReader, generation: int, branch: int = 0) -> int | None:
    """Return the last step recorded so far, parents included; None without any."""
    for part in lineage(reader, generation, branch):
        if (step := _last_step(reader, generation, *part)) is not None:
            return step
    return None


def _last_step(
    reader: TraceReader, generation: int, branch: int, first: int, stop: int | None
) -> int | None:
    last = reader.last_step(generation, branch)
    if last is None or stop is None:
        return last
    return min(last, stop - 1) if stop > first else None


def step_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> list[StepRow]:
    """Return the steps `start <= step < stop`, in order."""
    found: list[StepRow] = []
    for number, low, high in _branch_ranges(reader, generation, start, stop, branch):
        found += reader.steps(generation, number, low, high)
    return found


def chosen_tokens(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, int | None]:
    """Return the token that each step `start <= step < stop` chose, None where it is not known."""
    sql = f"SELECT step, chosen_id FROM steps {_STEP_RANGE_SQL}"
    found: dict[int, int | None] = {}
    for number, low, high in _branch_ranges(reader, generation, start, stop, branch):
        for row in reader._query(sql, (generation, number, low, high)):
            step, chosen = reader._decode(_decode_step_and_token, row)
            found[step] = chosen
    return found


def _decode_step_and_token(row: Sequence[Any]) -> list[Any]:
    return decode.decode_values(("int", "int?"), row, "steps")


def decode_phase_time(reader: TraceReader, generation: int, branch: int = 0) -> tuple[int, float]:
    """Return how many decode steps a branch has made itself, and their milliseconds together."""
    sql = f"SELECT count(*), total(wall_ms) FROM steps {WHERE_BRANCH} AND phase = 'decode'"
    ((number, total),) = reader._query(sql, (generation, branch))
    return int(number), float(total)


def memory_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, MemoryRecord]:
    """Return the memory at the end of each step `start <= step < stop` that has it."""
    found: dict[int, MemoryRecord] = {}
    for number, low, high in _branch_ranges(reader, generation, start, stop, branch):
        rest = f"{_STEP_RANGE_SQL} ORDER BY step"
        params = (generation, number, low, high)
        for values in reader._select(schema.MEMORY, rest, params, skip=2):
            found[values[0]] = reader._decode(decode.decode_memory, values[1:])
    return found


def layer_stats_range(
    reader: TraceReader,
    generation: int,
    start: int,
    stop: int,
    branch: int = 0,
    *,
    statistic: Statistic = "norm",
) -> list[StatCell]:
    """Return one statistic of all modules in the steps `start <= step < stop`, as captured.

    At most `MOST_ROWS` of them.
    """
    sql = (
        f"SELECT step, layer, module, {_STATISTIC_SQL[statistic]}, n_nan + n_inf FROM layer_stats "
        f"{_STEP_RANGE_SQL} ORDER BY step, number LIMIT ?"
    )
    kinds = ("int", "int", "text", "real", "int")
    found: list[StatCell] = []
    for number, low, high in _branch_ranges(reader, generation, start, stop, branch):
        params = (generation, number, low, high, MAX_STAT_ROWS - len(found))
        for row in reader._query(sql, params):
            values = reader._decode(
                lambda row: decode.decode_values(kinds, row, "layer_stats"), row
            )
            found.append(StatCell(*values))
    return found


def first_nonfinite_output(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> NonfiniteOutput | None:
    """Return the lowest layer with NaN or Inf of the earliest such step, None without any.

    Of one branch alone. Reads two narrow columns of the steps `start <= step < stop` and stops at
    the first that has one.
    """
    rest = f"{_STEP_RANGE_SQL} AND (n_nan > 0 OR n_inf > 0) ORDER BY step, layer, number LIMIT 1"
    rows = reader._select(schema.LAYER_STATS, rest, (generation, branch, start, stop), skip=2)
    if not rows:
        return None
    step, _, *values = rows[0]
    return NonfiniteOutput(step, reader._decode(decode.decode_layer_stat, values))


def _branch_ranges(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (branch, first step, step after the last) of a range, in order of steps."""
    for number, first, end in reversed(lineage(reader, generation, branch)):
        low, high = max(first, start), stop if end is None else min(end, stop)
        if low < high:
            yield number, low, high
