"""Load steps as whole records, a few queries for many steps.

`TraceReader.record` and `flexinspect.trace.replay` both load through `load_steps`, so what a rule
sees offline is what the reader returns.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.records.step import MASK_ARRAYS, TRAIN, ArrayRecord, MaskRecord, StepRecord
from flexinspect.trace import arrays, codec, schema
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.schema import OPEN_END, WHERE_BRANCH

if TYPE_CHECKING:
    from flexinspect.trace.reader import TraceReader

STEPS_PER_READ = 64  # steps that `load_steps` reads at most, by default
ALL_STREAMS = ("*",)  # the streams that mean all arrays of a step

_ROWS_OF_STEP: Mapping[str, codec.RowFormat[Any]] = {
    "candidates": codec.CANDIDATE_ROWS,
    "inputs": codec.INPUTS_ROWS,
    "calls": codec.CALL_ROWS,
    "builds": codec.BUILD_ROWS,
    "layer_stats": codec.LAYER_STAT_ROWS,
    "memory": codec.MEMORY_ROWS,
    "masks": codec.MASK_ROWS,
}
_SEVERAL_PER_STEP = ("tokens", "calls", "builds", "layer_stats", "arrays", "events")
_ONE_PER_STEP = ("inputs", "memory")
"""The fields of a step's record: of its own row, several of another table, and at most one."""

_STEP_RANGE = f"{WHERE_BRANCH} AND step >= ? AND step <= ?"
_ARRAY_KEY_KINDS = ("int", "int", "text", "int?", "text?", "int")


class StoredArray(Struct, frozen=True):
    """An array with its step and the fingerprint of its mask (None: it belongs to the step)."""

    step: int
    owner: str | None
    record: ArrayRecord


def load_steps(
    reader: TraceReader,
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
    rows = reader._select(
        lambda row: (codec.decode_step(row), codec.decode_logits(row)), schema.STEPS, rest, params
    )
    if not rows:
        return []
    tables = _read_tables(reader, [step for step, _ in rows], streams)
    found = []
    for step, logits in rows:
        of = {name: tuple(by_step.get(step.step, ())) for name, by_step in tables.items()}
        fields: dict[str, Any] = {name: getattr(step, name) for name in codec.STEP_SCALARS}
        fields |= {name: of[name] for name in _SEVERAL_PER_STEP}
        fields |= {name: next(iter(of[name]), None) for name in _ONE_PER_STEP}
        fields["masks"] = tuple(with_arrays(mask, of["stored"]) for mask in of["masks"])
        if logits is not None:
            fields["logits"] = replace(logits, candidates=of["candidates"])
        if step.phase == TRAIN:
            fields["training"] = reader.training_step(generation, step.step, branch)
        found.append(StepRecord(**fields))
    return found


def read_arrays(
    reader: TraceReader, generation: int, where: str, params: Sequence[Any]
) -> Iterator[StoredArray]:
    """Yield the arrays of one branch of a generation for which `where` holds, in order.

    Raises `TraceError` when a part, a checksum or a length is wrong.
    """
    sql = f"{schema.READ_ARRAYS} {where} {schema.ARRAY_ORDER}"

    def make(row: Sequence[Any]) -> tuple[list[Any], arrays.ArrayChunk]:
        return codec.decode_values(_ARRAY_KEY_KINDS, row[:6], "arrays"), codec.decode_chunk(row[6:])

    rows = reader._read(make, sql, params)
    for (step, _), group in itertools.groupby(rows, key=lambda row: row[0][:2]):
        keys, chunks = zip(*group, strict=True)
        _, _, stream, layer, owner, _ = keys[0]
        name = f"{stream!r} of step {step} of generation {generation} in {reader.path}"
        if [key[-1] for key in keys] != list(range(len(keys))):
            raise arrays.damaged_array(name, "a part of it is missing")
        array, dtype = arrays.decode_array(chunks, name)
        true_dtype = None if dtype == array.dtype.name else dtype
        yield StoredArray(step, owner, ArrayRecord(stream, array, layer, true_dtype))


def with_arrays(mask: MaskRecord, stored: Iterable[StoredArray]) -> MaskRecord:
    """Return a mask with those of the arrays that it owns."""
    by_stream = {
        each.record.stream: each.record.array for each in stored if each.owner == mask.fingerprint
    }
    fields: dict[str, Any] = {name: by_stream.get(f"mask.{name}") for name in MASK_ARRAYS}
    return replace(mask, **fields)


def _read_tables(
    reader: TraceReader, steps: Sequence[StepRow], streams: Collection[str]
) -> dict[str, dict[int | None, list[Any]]]:
    """Return what the other tables hold of consecutive steps of a branch, by step.

    "stored" are the arrays of masks and steps, "arrays" only the arrays of steps.
    """
    branch = (steps[0].generation, steps[0].branch)
    place = (*branch, steps[0].step, steps[-1].step)
    names = (*_ROWS_OF_STEP, "stored", "arrays", "tokens", "events")
    tables: dict[str, dict[int | None, list[Any]]] = {name: defaultdict(list) for name in names}
    for name, rows in _ROWS_OF_STEP.items():
        rest = f"{_STEP_RANGE} ORDER BY {', '.join(rows.table.key[2:])}"
        for step, record in reader._records_by_step(rows, rest, place):
            tables[name][step].append(record)
    wanted = [] if "*" in streams else sorted(streams)
    own = "true" if "*" in streams else f"stream IN ({', '.join('?' * len(wanted))})"
    where = f"{_STEP_RANGE} AND (owner IS NOT NULL OR {own})"
    for stored in read_arrays(reader, branch[0], where, (*place, *wanted)):
        tables["stored"][stored.step].append(stored)
        if stored.owner is None:
            tables["arrays"][stored.step].append(stored.record)
    chosen = [pos for step in steps for pos in (step.first_pos, step.last_pos) if pos is not None]
    if chosen:
        rest = f"{WHERE_BRANCH} AND pos >= ? AND pos <= ? ORDER BY pos"
        for token in reader._records(codec.TOKEN_ROWS, rest, (*branch, min(chosen), max(chosen))):
            tables["tokens"][token.step].append(token)
    # Only events that were written with a step have a branch.
    rest = f"{_STEP_RANGE} ORDER BY event"
    for row in reader._select(codec.decode_event, schema.EVENTS, rest, place):
        tables["events"][row.event.step].append(row.event)
    return tables
