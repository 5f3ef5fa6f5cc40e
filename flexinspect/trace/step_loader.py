"""Load steps as whole records, a few queries for many steps.

`TraceReader.record` and `flexinspect.trace.replay` both load through `load_steps`, so what a rule
sees offline is what the reader returns.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexinspect.records.step import (
    MASK_ARRAYS,
    TRAIN,
    ArrayRecord,
    LogitsRecord,
    MaskRecord,
    StepRecord,
)
from flexinspect.trace import arrays, codec, schema
from flexinspect.trace.codec import RowFormat
from flexinspect.trace.query_base import OPEN_END, WHERE_BRANCH, TraceQueries
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader_queries import TrainingQueries

STEPS_PER_READ = 64
"""Steps that `load_steps` reads at most, by default."""

ALL_STREAMS = ("*",)
"""The streams that mean all arrays of a step."""

_ROWS_OF_STEP: tuple[RowFormat[Any], ...] = (
    codec.CANDIDATE_ROWS,
    codec.INPUTS_ROWS,
    codec.CALL_ROWS,
    codec.BUILD_ROWS,
    codec.LAYER_STAT_ROWS,
    codec.MEMORY_ROWS,
)

_STEP_SCALARS = (
    *("generation", "branch", "step", "phase", "q_len", "kv_before", "kv_after"),
    *("started_at", "wall_ms", "capture_ms"),
)
_SEVERAL_PER_STEP = ("tokens", "calls", "builds", "layer_stats", "masks", "arrays", "events")
_ONE_PER_STEP = ("inputs", "memory", "training")
"""The fields of a step's record: of its own row, several of another table, and at most one."""

_STEP_RANGE = f"{WHERE_BRANCH} AND step >= ? AND step <= ?"
_ARRAY_KEY_KINDS = ("int", "int", "text", "int?", "text?", "int")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array with its step and the fingerprint of its mask (None: it belongs to the step)."""

    step: int
    owner: str | None
    record: ArrayRecord


RowsByStep = Mapping[int, Sequence[Any]]
"""The records of one table by step; a step without any has none or an empty sequence."""


def load_steps(
    reader: TrainingQueries,
    generation: int,
    branch: int = 0,
    start: int = 0,
    stop: int | None = None,
    *,
    streams: Collection[str] = (),
    limit: int = STEPS_PER_READ,
) -> list[StepRecord]:
    """Return the recorded steps `start <= step < stop` (None: to the end), at most `limit`.

    They are as `TraceWriter.write_step` received them, but without findings. Masks have all their
    arrays; of the steps' own arrays only those of `streams` are read (`ALL_STREAMS`: all). Raises
    `TraceError` when the file is damaged.
    """
    rest = f"{WHERE_BRANCH} AND step >= ? AND step < ? ORDER BY step LIMIT ?"
    params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
    rows = reader._select(schema.STEPS, rest, params)
    if not rows:
        return []
    steps = [reader._decode(codec.decode_step, row) for row in rows]
    tables = _read_tables(reader, steps, streams)
    return [_build_step(reader, step, row, tables) for step, row in zip(steps, rows, strict=True)]


def read_arrays(
    reader: TraceQueries, generation: int, where: str, params: Sequence[Any]
) -> Iterator[StoredArray]:
    """Yield the arrays of one branch of a generation for which `where` holds, in order.

    Raises `TraceError` when a part, a checksum or a length is wrong.
    """
    rows = reader._query(f"{schema.READ_ARRAYS} {where} {schema.ARRAY_ORDER}", params)
    for _, chunks in itertools.groupby(rows, key=lambda row: (row[0], row[1])):
        part = list(chunks)
        yield reader._decode(lambda rows: _decode_array(reader, generation, rows), part)


def _decode_array(
    reader: TraceQueries, generation: int, rows: Sequence[Sequence[Any]]
) -> StoredArray:
    step, _, stream, layer, owner, _ = codec.decode_values(_ARRAY_KEY_KINDS, rows[0][:6], "arrays")
    name = f"{stream!r} of step {step} of generation {generation} in {reader.path}"
    if [row[5] for row in rows] != list(range(len(rows))):
        raise arrays.damaged_array(name, "a part of it is missing")
    array, dtype = arrays.decode_array([codec.decode_chunk(row[6:]) for row in rows], name)
    true_dtype = None if dtype == array.dtype.name else dtype
    return StoredArray(step, owner, ArrayRecord(stream, array, layer, true_dtype))


def with_arrays(mask: MaskRecord, stored: Iterable[StoredArray]) -> MaskRecord:
    """Return a mask with those of the arrays that it owns."""
    by_stream = {
        each.record.stream: each.record.array for each in stored if each.owner == mask.fingerprint
    }
    fields: dict[str, Any] = {name: by_stream.get(f"mask.{name}") for name in MASK_ARRAYS}
    return replace(mask, **fields)


def _build_step(
    reader: TraceQueries, step: StepRow, row: Sequence[Any], tables: Mapping[str, RowsByStep]
) -> StepRecord:
    """Return a step from its row, and from the rows of the other tables."""

    def of(name: str) -> Sequence[Any]:
        return tables[name].get(step.step, ())

    scalars: dict[str, Any] = {name: getattr(step, name) for name in _STEP_SCALARS}
    several: dict[str, Any] = {name: tuple(of(name)) for name in _SEVERAL_PER_STEP}
    one: dict[str, Any] = {name: next(iter(of(name)), None) for name in _ONE_PER_STEP}
    logits = _build_logits(reader, row, of("candidates"))
    return StepRecord(**scalars, **several, **one, logits=logits)


def _build_logits(
    reader: TraceQueries, row: Sequence[Any], candidates: Sequence[Any]
) -> LogitsRecord | None:
    if not codec.has_logits(row):
        return None
    return reader._decode(lambda row: codec.decode_logits(row, tuple(candidates)), row)


def _read_tables(
    reader: TrainingQueries, steps: Sequence[StepRow], streams: Collection[str]
) -> dict[str, RowsByStep]:
    """Return the rows that the tables hold of consecutive steps of a branch."""
    first = steps[0]
    place = (first.generation, first.branch, first.step, steps[-1].step)
    tables: dict[str, RowsByStep] = {
        rows.table.name: _read_table(reader, place, rows) for rows in _ROWS_OF_STEP
    }
    stored = _read_stored_arrays(reader, place, streams)
    tables["arrays"] = {
        step: [each.record for each in found if each.owner is None]
        for step, found in stored.items()
    }
    tables["masks"] = _read_masks(reader, place, stored)
    tables["tokens"] = _read_tokens(reader, steps)
    tables["training"] = {
        step.step: [reader.training_step(step.generation, step.step, step.branch)]
        for step in steps
        if step.phase == TRAIN
    }
    tables["events"] = _read_events(reader, place)
    return tables


def _read_table(reader: TraceQueries, place: Sequence[int], rows: RowFormat[Any]) -> RowsByStep:
    found: dict[int, list[Any]] = defaultdict(list)
    rest = f"{_STEP_RANGE} ORDER BY {', '.join(rows.table.key[2:])}"
    for row in reader._select(rows.table, rest, place, skip=2):
        found[row[0]].append(reader._decode(rows.decode, row[rows.skip - 2 :]))
    return found


def _read_stored_arrays(
    reader: TraceQueries, place: Sequence[int], streams: Collection[str]
) -> Mapping[int, list[StoredArray]]:
    """Return the arrays of masks, and those of `streams`."""
    wanted = [] if "*" in streams else sorted(streams)
    own = "true" if "*" in streams else f"stream IN ({', '.join('?' * len(wanted))})"
    where = f"{_STEP_RANGE} AND (owner IS NOT NULL OR {own})"
    found: dict[int, list[StoredArray]] = defaultdict(list)
    for stored in read_arrays(reader, place[0], where, (*place, *wanted)):
        found[stored.step].append(stored)
    return found


def _read_masks(
    reader: TraceQueries, place: Sequence[int], stored: Mapping[int, Sequence[StoredArray]]
) -> RowsByStep:
    return {
        step: [with_arrays(mask, stored.get(step, ())) for mask in masks]
        for step, masks in _read_table(reader, place, codec.MASK_ROWS).items()
    }


def _read_tokens(reader: TraceQueries, steps: Sequence[StepRow]) -> RowsByStep:
    """Return the tokens that steps chose."""
    found: dict[int, list[Any]] = defaultdict(list)
    first = min((s.first_pos for s in steps if s.first_pos is not None), default=None)
    last = max((s.last_pos for s in steps if s.last_pos is not None), default=None)
    if first is None or last is None:
        return found
    rest = f"{WHERE_BRANCH} AND pos >= ? AND pos <= ? ORDER BY pos"
    params = (steps[0].generation, steps[0].branch, first, last)
    for token in reader._records(codec.TOKEN_ROWS, rest, params):
        if token.step is not None:
            found[token.step].append(token)
    return found


def _read_events(reader: TraceQueries, place: Sequence[int]) -> RowsByStep:
    """Return the events that were written with steps; the others have no branch."""
    found: dict[int, list[Any]] = defaultdict(list)
    rest = f"{_STEP_RANGE} ORDER BY event"
    for row in reader._made(codec.decode_event, schema.EVENTS, rest, place):
        if row.event.step is not None:
            found[row.event.step].append(row.event)
    return found
