"""A finished trace once more, step by step, as rules saw it live: read in pieces, a query a table.

`TraceReader.record` asks some fifteen questions per step, and reads every array; this asks as many
for `PIECE` steps, and reads the masks and those streams alone that somebody wants.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexinspect.core.errors import TraceError
from flexinspect.records.step import (
    STANDALONE_CALLS,
    STANDALONE_MASKS,
    STANDALONE_RAISED,
    TRAIN,
    ArrayRecord,
    EventRecord,
    GenerationRecord,
    MaskRecord,
    StepRecord,
)
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace import arrays, codec, schema
from flexinspect.trace.queries.branch_queries import generation_in_branch
from flexinspect.trace.queries.range_queries import lineage
from flexinspect.trace.queries.search_queries import read_tokens
from flexinspect.trace.query_base import WHERE_BRANCH
from flexinspect.trace.reader import TraceReader, read_all_gradients
from flexinspect.trace.rows import BranchRow, GenerationRow, StepRow
from flexinspect.trace.schema import Table

STEPS_PER_READ = 64
"""Steps that are read at once."""

_STEP_TABLES: tuple[tuple[Table, str, Callable[[Sequence[Any]], Any], int], ...] = (
    (schema.CANDIDATES, "rank", codec.decode_candidate, 3),
    (schema.INPUTS, "step", codec.decode_inputs, 3),
    (schema.CALLS, "call", codec.decode_call, 4),
    (schema.BUILDS, "build", codec.decode_build, 4),
    (schema.LAYER_STATS, "number", codec.decode_layer_stat, 4),
    (schema.MEMORY, "step", codec.decode_memory, 3),
)
"""Tables of a step: their order within it, what makes records of rows, and the width of the key."""

RowsByStep = Mapping[int, list[Any]]
"""By step, what a table holds of it; an empty list for a step that has nothing."""

_STEP_SPAN_SQL = f"{WHERE_BRANCH} AND step >= ? AND step <= ?"
_ARRAY_KINDS = ("int", "int", "text", "int?", "text?", "int")
_STEP_ARRAYS_SQL = (
    "SELECT step, number, stream, layer, owner, chunk, dtype, item, shape, codec, checksum, data "
    f"FROM arrays {_STEP_SPAN_SQL} AND (owner IS NOT NULL OR %s) "
    "ORDER BY generation, branch, step, number, chunk"
)


def is_standalone(generation: GenerationRow) -> bool:
    """Tell whether a generation is a call of FlexAttention outside of any model."""
    name = generation.sample_id
    return name in (STANDALONE_MASKS, STANDALONE_RAISED) or name.startswith(STANDALONE_CALLS)


def generation_at_start(reader: TraceReader, about: GenerationRow) -> GenerationRecord:
    """Return a generation as it was when it began: its prompt, its segments, what was declared."""
    number = about.generation
    tokens = reader.tokens(number)
    return GenerationRecord(
        *(number, about.sample_id, about.mask, about.positions),
        segments=tuple(reader.segments(number)),
        tokens=tuple(token for token in tokens if token.step is None),
        expected=about.expected,
        declared=about.declared,
        started_at=about.started_at,
        model=about.model,
    )


def replay(
    reader: TraceReader, generation: int, streams: Collection[str] = ()
) -> Iterator[StepRecord | EventRecord | GradientRecord]:
    """Yield the steps of a generation, and the events that belong to none of them, as they came.

    Those of its first branch, then the gradients of their tokens; `steps` gives the steps of other
    branches. Of the steps' own arrays only those of `streams` are there ("*": all); findings are
    left out. Raises `TraceError`.
    """
    heard = _PendingEvents(reader, generation)
    for step in replay_steps(reader, generation, 0, streams):
        yield from heard.before(step)
        yield step
    yield from read_all_gradients(reader, generation)
    yield from heard.remaining()


def replay_steps(
    reader: TraceReader, generation: int, branch: int, streams: Collection[str] = ()
) -> Iterator[StepRecord]:
    """Yield the steps of one branch, in order, without findings; see `replay`."""
    first = 0
    while True:
        rest = f"{WHERE_BRANCH} AND step >= ? ORDER BY step LIMIT ?"
        rows = reader._select(schema.STEPS, rest, (generation, branch, first, STEPS_PER_READ))
        if not rows:
            return
        about = [reader._decode(codec.decode_step, row[:-3]) for row in rows]
        first = about[-1].step + 1
        of = _read_step_tables(reader, about, streams)
        for step, row in zip(about, rows, strict=True):
            yield _build_step(reader, step, row, of)


class _PendingEvents:
    """Events that belong to a generation and to no step that was recorded."""

    def __init__(self, reader: TraceReader, generation: int) -> None:
        found = reader.events(generation=generation)
        self._events = deque(row.event for row in found if row.branch is None)

    def before(self, step: StepRecord) -> Iterator[EventRecord]:
        """Yield, once, those that came before a step was over."""
        over = step.started_at + step.wall_ms / 1e3
        while self._events and not self._events[0].at > over:
            yield self._events.popleft()

    def remaining(self) -> Iterator[EventRecord]:
        """Yield those that are left."""
        while self._events:
            yield self._events.popleft()


def _build_step(
    reader: TraceReader, about: StepRow, row: Sequence[Any], of: Mapping[str, RowsByStep]
) -> StepRecord:
    """Return a step from all its columns and from what its tables hold."""
    step = about.step
    inputs, memory = of["inputs"][step], of["memory"][step]
    logits = None
    if about.chosen_id is not None:
        candidates = tuple(of["candidates"][step])
        logits = reader._decode(lambda values: codec.decode_logits(values, candidates), row[12:])
    return StepRecord(
        *(about.generation, step, about.phase, about.q_len, about.kv_before, about.kv_after),
        *(about.started_at, about.wall_ms, about.capture_ms, about.branch),
        logits=logits,
        tokens=tuple(of["tokens"][step]),
        inputs=inputs[0] if inputs else None,
        calls=tuple(of["calls"][step]),
        builds=tuple(of["builds"][step]),
        layer_stats=tuple(of["layer_stats"][step]),
        memory=memory[0] if memory else None,
        masks=tuple(of["masks"][step]),
        arrays=tuple(of["arrays"][step]),
        training=next(iter(of["training"][step]), None),
        events=tuple(of["events"][step]),
    )


def _read_step_tables(
    reader: TraceReader, about: Sequence[StepRow], streams: Collection[str]
) -> dict[str, RowsByStep]:
    """Return what the tables hold of some steps of a branch that follow each other."""
    place = (about[0].generation, about[0].branch, about[0].step, about[-1].step)
    of: dict[str, RowsByStep] = {}
    for table, order, make, skip in _STEP_TABLES:
        found: dict[int, list[Any]] = defaultdict(list)
        for values in reader._select(
            table, f"{_STEP_SPAN_SQL} ORDER BY step, {order}", place, skip=2
        ):
            found[values[0]].append(reader._decode(make, values[skip - 2 :]))
        of[table.name] = found
    of["tokens"] = _read_tokens(reader, about)
    of["training"] = _read_training(reader, about)
    of["events"] = _read_events(reader, place)
    wide = _read_arrays(reader, place, streams)
    of["masks"] = _read_masks(reader, place, wide)
    of["arrays"] = {
        step: [array for owner, array in wide[step] if owner is None]
        for step in (row.step for row in about)
    }
    return of


def _read_training(reader: TraceReader, about: Sequence[StepRow]) -> RowsByStep:
    found: dict[int, list[Any]] = defaultdict(list)
    for row in about:
        if row.phase == TRAIN:
            found[row.step].append(reader.training_step(row.generation, row.step, row.branch))
    return found


def _read_tokens(reader: TraceReader, about: Sequence[StepRow]) -> RowsByStep:
    found: dict[int, list[Any]] = defaultdict(list)
    bounds = [(row.first_pos, row.last_pos) for row in about if row.first_pos is not None]
    if bounds:
        first = min(low for low, _ in bounds if low is not None)
        last = max(high for _, high in bounds if high is not None)
        for token in reader.tokens(about[0].generation, about[0].branch, first, last + 1):
            if token.step is not None:
                found[token.step].append(token)
    return found


def _read_events(reader: TraceReader, place: Sequence[int]) -> RowsByStep:
    """Return the events that came with steps; those heard beside them name no branch."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in reader._records(
        codec.decode_event, schema.EVENTS, f"{_STEP_SPAN_SQL} ORDER BY event", place
    ):
        if row.event.step is not None:
            found[row.event.step].append(row.event)
    return found


def _read_arrays(
    reader: TraceReader, place: Sequence[int], streams: Collection[str]
) -> Mapping[int, list[tuple[str | None, ArrayRecord]]]:
    """Return the arrays of steps with the fingerprints of the masks that own them."""
    found: dict[int, list[tuple[str | None, ArrayRecord]]] = defaultdict(list)
    wanted = [] if "*" in streams else sorted(streams)
    sql = _STEP_ARRAYS_SQL % (
        "true" if "*" in streams else f"stream IN ({', '.join('?' * len(wanted))})"
    )
    rows = reader._query(sql, (*place, *wanted))
    for (step, _), part in itertools.groupby(rows, key=lambda row: (row[0], row[1])):
        found[step].append(
            reader._decode(lambda chunks: _decode_owned_array(reader, place, chunks), list(part))
        )
    return found


def _decode_owned_array(
    reader: TraceReader, place: Sequence[int], rows: Sequence[Sequence[Any]]
) -> tuple[str | None, ArrayRecord]:
    step, _, stream, layer, owner, _ = codec.decode_values(_ARRAY_KINDS, rows[0][:6], "arrays")
    where = f"{stream!r} of step {step} of generation {place[0]} in {reader.path}"
    if [row[5] for row in rows] != list(range(len(rows))):
        raise arrays.damaged_array(where, "a part of it is missing")
    array, dtype = arrays.decode_array([codec.decode_chunk(row[6:]) for row in rows], where)
    true = None if dtype == array.dtype.name else dtype
    return owner, ArrayRecord(stream, array, layer, true)


def _read_masks(
    reader: TraceReader,
    place: Sequence[int],
    wide: Mapping[int, list[tuple[str | None, ArrayRecord]]],
) -> RowsByStep:
    found: dict[int, list[Any]] = defaultdict(list)
    rest = f"{_STEP_SPAN_SQL} ORDER BY step, fingerprint"
    for step, *values in reader._select(schema.MASKS, rest, place, skip=2):
        mask: MaskRecord = reader._decode(codec.decode_mask, values)
        have = {
            record.stream.removeprefix("mask."): record.array
            for owner, record in wide[step]
            if owner == mask.fingerprint
        }
        found[step].append(
            replace(
                mask,
                cells=have.get("cells"),
                averaged=have.get("averaged"),
                partial=have.get("partial"),
                full=have.get("full"),
            )
        )
    return found


def replay_parents_from_path(
    path: Path, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Show a book the steps before a branch begins, oldest first; returns who failed at it.

    What they find there was said of the parent. A trace that cannot be read shows nothing.
    """
    try:
        with TraceReader(path) as reader:
            return list(replay_parents(reader, generation, branch, runner))
    except TraceError:
        return []


def read_step(path: Path, generation: int, step: int, branch: int) -> StepRecord | None:
    """Return a step as it was written, None where it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return reader.record(generation, step, branch)
    except TraceError:
        return None


def replay_parents(
    reader: TraceReader, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Do as `recall` does, with a trace that is open. Raises `TraceError`."""
    events: list[EventRecord] = []
    for parent, _, stop in reversed(lineage(reader, generation, branch)[1:]):
        for step in replay_steps(reader, generation, parent, runner.streams):
            if stop is not None and step.step >= stop:
                break
            events += runner.replay_parent_step(step)
    return events


def branch_start_record(
    reader: TraceReader, generation: GenerationRow, row: BranchRow
) -> GenerationRecord:
    """Return a generation as a branch finds it when it begins: its mask, and what is given.

    Where all keys are computed anew, the tokens before the fork are given, as a prompt is.
    """
    begun = generation_at_start(reader, generation_in_branch(reader, generation, row.branch))
    if row.change.get("recomputed") is not True:
        return begun
    step = row.fork_step or 0
    earlier = read_tokens(reader, generation.generation, row.branch)
    given = [replace(t, step=None) for t in earlier if t.step is not None and t.step < step]
    return replace(begun, tokens=(*begun.tokens, *given))
