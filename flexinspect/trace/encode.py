"""Records into statements: what one transaction of the trace consists of.

Everything here runs beside a model, so rows are built as flat lists of parameters, one statement
per table.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flexinspect.findings import Finding, Repeat
from flexinspect.gradientrecords import GradientRecord
from flexinspect.prompts import Segment
from flexinspect.records import (
    BuildRecord,
    CallRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    InputsRecord,
    LogitsRecord,
    MaskRecord,
    OutputRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace import schema, trainingcode
from flexinspect.trace.columns import Table, insert_sql
from flexinspect.trace.values import to_json

if TYPE_CHECKING:
    from flexinspect.trace.arrays import EncodedArray

Statement = tuple[str, Sequence[Any]]
"""SQL and its parameters."""

RowKey = tuple[int, int, int]
"""Generation, branch, step."""

MAX_ROWS_PER_INSERT = 128
"""Rows in one statement at most; keeps the number of parameters below SQLite's limit."""

_MAX_ARRAYS_PER_INSERT = 8

_call_values = attrgetter(*schema.CALLS.names[4:])
_build_values = attrgetter(*schema.BUILDS.names[4:])
_stat_values = attrgetter(*schema.LAYER_STATS.names[4:])
_candidate_values = attrgetter(*schema.CANDIDATES.names[3:])
_memory_values = attrgetter(*schema.MEMORY.names[3:])
_mask_values = attrgetter(*schema.MASKS.names[3:-1])
_parameter_values = attrgetter(*schema.GRADS.names[3:])
_gradient_values = attrgetter(*schema.GRADIENTS.names[3:])
_token_values = attrgetter(*schema.TOKENS.names[2:-2])
_segment_values = attrgetter("start", "stop", "label")
_step_values = attrgetter(*schema.STEPS.names[:10])
_logits_values = attrgetter(
    *("entropy", "margin", "chosen_id", "chosen_rank", "chosen_logprob"),
    *("n_nan", "n_inf", "histogram_min", "histogram_max"),
)
_NO_LOGITS = (None,) * 10


def encode_step(record: StepRecord, known_masks: Collection[str]) -> list[Statement]:
    """Return the statements of a step; masks whose fingerprint is in `known` are left out."""
    key = (record.generation, record.branch, record.step)
    out: list[Statement] = []
    _add_step_row(out, record)
    if record.tokens:
        encode_tokens(out, key[:2], record.tokens)
    if record.logits is not None:
        _add_candidates(out, key, record.logits)
    if record.inputs is not None:
        _add_insert(out, schema.INPUTS, [*key, *_inputs_values(record.inputs)], 1)
    _add_calls(out, key, record.calls)
    _add_builds(out, key, record.builds)
    _add_layer_stats(out, key, record)
    if record.memory is not None:
        _add_insert(out, schema.MEMORY, [*key, *_memory_values(record.memory)], 1)
    if record.training is not None:
        out += trainingcode.encode_training_step(key, record.training)
    if record.masks or record.arrays:
        _add_masks_and_arrays(out, key, _new_masks(record, known_masks), record)
    encode_findings(out, record.findings, key)
    encode_repeats(out, record.repeats, key)
    encode_events(out, record.events, key)
    return out


def encode_gradients(record: GradientRecord) -> list[Statement]:
    """Return the statements of a token's gradients; its step may have been written long ago."""
    from flexinspect.trace.arrays import encode_array

    key = (record.generation, record.branch, record.step)
    out: list[Statement] = []
    _add_insert(out, schema.GRADIENTS, [*key, *_gradient_values(record)], 1)
    flat: list[Any] = []
    for stat in record.stats:
        flat += (*key, *_parameter_values(stat))
    _add_insert(out, schema.GRADS, flat, len(record.stats))
    wide: list[Any] = []
    for number, name in enumerate(("tokens", "layers"), schema.FIRST_GRADIENT_ARRAY):
        array = getattr(record, name)
        if array is not None:
            _add_array_rows(
                wide, (*key, number), (f"grads.{name}", None, None), encode_array(array)
            )
    width = len(schema.ARRAYS.columns)
    _add_insert(out, schema.ARRAYS, wide, len(wide) // width, batch=_MAX_ARRAYS_PER_INSERT)
    return out


def encode_generation_start(record: GenerationRecord) -> list[Statement]:
    """Return the statements of a new generation with its first branch."""
    declared, expected = to_json(dict(record.declared)), to_json(list(record.expected))
    about = (record.generation, record.sample_id, record.mask, record.positions)
    out: list[Statement] = []
    rest = (expected, declared, record.started_at, record.model)
    _add_insert(out, schema.GENERATIONS, [*about, *rest], 1)
    out += encode_branch_start(record.generation, 0, None, None, record.started_at)
    encode_segments(out, (record.generation, 0), record.segments)
    encode_tokens(out, (record.generation, 0), record.tokens)
    return out


def encode_branch_start(
    generation: int,
    branch: int,
    parent: int | None,
    fork_step: int | None,
    at: float,
    change: Mapping[str, Any] | None = None,
) -> list[Statement]:
    """Return the statements of a new branch."""
    row = [generation, branch, parent, fork_step, "recording", "", "", at, None]
    return [(insert_sql(schema.BRANCHES, 1), [*row, to_json(dict(change or {}))])]


def encode_generation_end(record: GenerationEnd) -> list[Statement]:
    """Return the statements that end a branch of a generation and set its segments anew."""
    which = (record.generation, record.branch)
    how = (record.state, record.answer, record.stop_reason, _nan_as_text(record.ended_at))
    out: list[Statement] = [(schema.END_BRANCH, [*how, *which])]
    if record.segments:
        out.append((schema.DROP_SEGMENTS, which))
        encode_segments(out, which, record.segments)
    return out


def encode_trace_end(state: str, facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that end a trace: branches still open end in `state`."""
    out: list[Statement] = [(schema.END_OPEN_BRANCHES, [state, time.time()])]
    return out + encode_run_facts({**facts, "state": state})


def encode_run_facts(facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that set facts of the manifest."""
    return [(schema.SET_FACT, (str(key), to_json(value))) for key, value in facts.items()]


def encode_segments(
    out: list[Statement], which: tuple[int, int], records: Iterable[Segment]
) -> None:
    """Add the statements of the segments of a branch."""
    flat: list[Any] = []
    n_rows = 0
    for n_rows, record in enumerate(records, start=1):
        kind = getattr(record.kind, "value", record.kind)  # sqlite3 is slow with an enum
        flat += (*which, n_rows - 1, *_segment_values(record), kind, record.owner)
    _add_insert(out, schema.SEGMENTS, flat, n_rows)


def encode_tokens(
    out: list[Statement], which: Sequence[int], records: Sequence[TokenRecord]
) -> None:
    """Add the statements of tokens of a branch."""
    flat: list[Any] = []
    for record in records:
        flat += (*which, *_token_values(record), 1 if record.special else 0, record.step)
    _add_insert(out, schema.TOKENS, flat, len(records))


def encode_findings(
    out: list[Statement], records: Iterable[Finding], key: RowKey | None = None
) -> None:
    """Add the statements of findings. Those of a step (`key`) take its place from it."""
    for record in records:
        place: Sequence[int | None] = (record.generation, record.branch, record.step)
        if key is not None:
            place = key if record.step is None else (*key[:2], record.step)
        what = (record.id, str(record.severity.value), record.sentence, record.layer, record.head)
        wide = (to_json(list(record.positions)), to_json(dict(record.evidence)))
        again = (to_json(list(record.layers)), record.series, record.last_step, record.times)
        words = (record.why, record.confirm, record.fix, record.query)
        row = [*place, *what, *wide, *again, *words]
        out.append((insert_sql(schema.FINDINGS, 1, skip=1), row))


def encode_repeats(out: list[Statement], records: Iterable[Repeat], key: RowKey) -> None:
    """Add the statements that count findings of earlier steps again in this one."""
    generation, branch, step = key
    for record in records:
        news = (record.sentence or None, to_json(record.evidence) if record.evidence else None)
        within = generation if record.generation is None else record.generation
        row = [step, *news, within, branch, record.id, record.series]
        out.append((schema.REPEAT_FINDING, row))


def encode_review(rule: str, generation: int, at: float, wall_ms: float) -> Statement:
    """Return the statement that says that a rule has looked at a generation afterwards."""
    row = [rule, generation, at, wall_ms]
    return insert_sql(schema.REVIEWS, 1), row


def encode_events(
    out: list[Statement], records: Iterable[EventRecord], key: RowKey | None = None
) -> None:
    """Add the statements of events. Those of a step (`key`) take what they lack from it."""
    for record in records:
        generation, branch, step = record.generation, None, record.step
        if key is not None:
            generation = key[0] if generation is None else generation
            branch, step = key[1], key[2] if step is None else step
        what = (record.kind, record.text, record.at, to_json(dict(record.data)))
        row = [generation, branch, step, *what]
        out.append((insert_sql(schema.EVENTS, 1, skip=1), row))


def encode_output(out: list[Statement], records: Iterable[OutputRecord]) -> None:
    """Add the statements of what was printed."""
    for record in records:
        row = [record.generation, record.step, record.stream, record.at, record.text]
        out.append((insert_sql(schema.OUTPUT, 1, skip=1), row))


def _add_step_row(out: list[Statement], record: StepRecord) -> None:
    logits = record.logits
    row = [*_step_values(record), *_position_bounds(record.tokens)]
    if logits is None:
        row += _NO_LOGITS
    else:
        # The text of a list of ints is JSON already, at a third of the price.
        row += (*_logits_values(logits), str([*map(int, logits.histogram)]))
    _add_insert(out, schema.STEPS, row, 1)


def _position_bounds(records: Sequence[TokenRecord]) -> tuple[int | None, int | None]:
    if not records:
        return None, None
    positions = [record.pos for record in records]
    return min(positions), max(positions)


def _add_candidates(out: list[Statement], key: RowKey, logits: LogitsRecord) -> None:
    flat: list[Any] = []
    for record in logits.candidates:
        flat += key
        flat += _candidate_values(record)
    _add_insert(out, schema.CANDIDATES, flat, len(logits.candidates))


def _inputs_values(record: InputsRecord) -> tuple[Any, ...]:
    # The text of lists of ints is JSON already.
    lists = ([*map(list, record.positions)], [*record.cached_before], [*record.cached_after])
    return record.batch, *map(str, lists)


def _add_calls(out: list[Statement], key: RowKey, records: Sequence[CallRecord]) -> None:
    flat: list[Any] = []
    for number, record in enumerate(records):
        row = _call_values(record)
        scale, gate, cap = record.scale, record.gate, record.softcap
        if gate != gate or scale != scale or cap != cap:
            numbers = (_nan_as_text(scale), _nan_as_text(gate), record.gate_kind, _nan_as_text(cap))
            row = (*row[:-8], *numbers, *row[-4:])
        flat += (*key, number)
        flat += row
    _add_insert(out, schema.CALLS, flat, len(records))


def _add_builds(out: list[Statement], key: RowKey, records: Sequence[BuildRecord]) -> None:
    flat: list[Any] = []
    for number, record in enumerate(records):
        flat += (*key, number, *_build_values(record))
    _add_insert(out, schema.BUILDS, flat, len(records))


def _add_layer_stats(out: list[Statement], key: RowKey, record: StepRecord) -> None:
    flat: list[Any] = []
    for number, stat in enumerate(record.layer_stats):
        flat += (*key, number)
        flat += _stat_values(stat)
    _add_insert(out, schema.LAYER_STATS, flat, len(record.layer_stats))


def _add_masks_and_arrays(
    out: list[Statement], key: RowKey, masks: Sequence[MaskRecord], record: StepRecord
) -> None:
    from flexinspect.trace.arrays import encode_array

    flat: list[Any] = []
    about: list[Any] = []
    number = 0
    for mask in masks:
        about += (*key, *_mask_values(mask), 1 if mask.compiled else 0)
        for stream, stored in _mask_arrays(mask):
            _add_array_rows(flat, (*key, number), (stream, None, mask.fingerprint), stored)
            number += 1
    for wide in record.arrays:
        stored = encode_array(wide.array, wide.dtype)
        _add_array_rows(flat, (*key, number), (wide.stream, wide.layer, None), stored)
        number += 1
    _add_insert(out, schema.MASKS, about, len(masks))
    width = len(schema.ARRAYS.columns)
    _add_insert(out, schema.ARRAYS, flat, len(flat) // width, batch=_MAX_ARRAYS_PER_INSERT)


def _new_masks(record: StepRecord, known_masks: Collection[str]) -> list[MaskRecord]:
    return list(
        {m.fingerprint: m for m in record.masks if m.fingerprint not in known_masks}.values()
    )


def _mask_arrays(mask: MaskRecord) -> Iterable[tuple[str, EncodedArray]]:
    from flexinspect.trace.arrays import encode_array

    for name in ("cells", "averaged", "partial", "full", "ruled"):
        array = getattr(mask, name)
        if array is not None:
            yield f"mask.{name}", encode_array(array)


def _add_array_rows(
    flat: list[Any], key: Sequence[int], what: Sequence[Any], stored: EncodedArray
) -> None:
    form = (stored.dtype, stored.item, stored.shape, stored.codec)
    for number, data in enumerate(stored.chunks):
        flat += (*key, number, *what, *form, zlib.crc32(data), data)


def _nan_as_text(value: float | None) -> float | str | None:
    """SQLite would make NULL of a NaN, which here means "none"."""
    return "nan" if value != value else value


def _add_insert(
    out: list[Statement],
    table: Table,
    flat: list[Any],
    n_rows: int,
    *,
    batch: int = MAX_ROWS_PER_INSERT,
) -> None:
    """Add the INSERT of `n_rows` rows, which lie one after the other in `flat`."""
    if not n_rows:
        return
    if n_rows <= batch:
        out.append((insert_sql(table, n_rows), flat))
        return
    size = len(flat) // n_rows * batch
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        n_part = len(part) * n_rows // len(flat)
        out.append((insert_sql(table, n_part), part))
