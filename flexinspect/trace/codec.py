"""Rows of a trace from records, and records from rows.

Encoding runs beside a model: rows are built as flat lists of parameters, one statement per table.
Which field goes to which column follows from the column tables of `flexinspect.trace.schema`.
JSON keeps non-finite floats, and values that SQLite cannot bind are replaced.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    MASK_ARRAYS,
    Array,
    BuildRecord,
    CallRecord,
    Candidate,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    InputsRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    OutputRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.records.token_gradients import GradientRecord, GradientStat
from flexinspect.records.training_step import (
    AnomalyOrigin,
    ParameterGradient,
    TrainingStepRecord,
    group_of,
)
from flexinspect.trace import schema
from flexinspect.trace.query_results import (
    ArrayInfo,
    BranchRow,
    EventRow,
    FindingRow,
    GenerationRow,
    OutputRow,
    StepRow,
)
from flexinspect.trace.schema import Table, insert_sql

if TYPE_CHECKING:
    from flexinspect.trace.arrays import ArrayChunk, EncodedArray

_FLOAT = "$float"
_DEPTH = 40


def to_json(value: Any) -> str:
    """Return strict JSON of `value`; never raises, because a recording must continue.

    Non-finite floats become `{"$float": "NaN"}` (or "Infinity", "-Infinity"), tuples, sets and
    numpy arrays become lists, numpy scalars numbers, anything else its `str`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_default)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(simplify(value, _tagged_float), ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_utf8(text) else _to_ascii(text)


def from_json(text: str) -> Any:
    """Return the value that `to_json` wrote, tuples as lists. Raises `ValueError` if damaged."""
    try:
        return json.loads(text, object_hook=_untag)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def plain_json(value: Any) -> str:
    """Return ASCII JSON for other programs: non-finite floats are "NaN", "Infinity", "-Infinity".

    ASCII also keeps control characters of a token from reaching a terminal.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(simplify(value, float_name), allow_nan=False)


def float_name(value: float) -> str:
    """Return the name of a non-finite float, in the spelling that `float()` reads."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def simplify(value: Any, on_float: Callable[[float], Any], depth: int = 0) -> Any:
    """Return `value` as dicts, lists, strings and numbers, with `on_float` of non-finite floats."""
    if depth > _DEPTH:
        return repr(type(value))
    if _is_numpy(value):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else on_float(value)
    if isinstance(value, Mapping):
        return {str(key): simplify(item, on_float, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [simplify(item, on_float, depth + 1) for item in value]
    return value if isinstance(value, str | int | None) else str(value)


def _is_numpy(value: Any, *, scalar: bool = False) -> bool:
    """Tell without importing numpy: its values exist only once it is imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.generic) or (not scalar and isinstance(value, numpy.ndarray))


def bindable(params: Iterable[Any]) -> list[Any]:
    """Return replacements that SQLite accepts for parameters that it refused.

    numpy scalars become numbers, integers beyond 64 bits and unknown objects become text, and lone
    surrogates, which UTF-8 cannot encode, become backslash escapes.
    """
    return [_bindable(param) for param in params]


def _bindable(value: Any) -> Any:
    if _is_numpy(value, scalar=True):
        value = value.item()
    if value is None or isinstance(value, float | bytes | bytearray | memoryview):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    return str(value).encode("utf-8", "backslashreplace").decode()


def _json_default(value: Any) -> Any:
    if _is_numpy(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _tagged_float(value: float) -> dict[str, str]:
    return {_FLOAT: float_name(value)}


def _untag(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_ascii(text: str) -> str:
    return json.dumps(json.loads(text))


Statement = tuple[str, Sequence[Any]]
"""SQL and its parameters."""

RowKey = tuple[int, int, int]
"""Generation, branch, step."""

MAX_ROWS_PER_INSERT = 128
"""Rows in one statement at most; keeps the number of parameters below SQLite's limit."""

_MAX_ARRAYS_PER_INSERT = 8
_MAX_GRADIENTS_PER_INSERT = 64

_FIRST_LOGITS_COLUMN = schema.STEPS.names.index("entropy")
_CHOSEN_COLUMN = schema.STEPS.names.index("chosen_id")
_HISTOGRAM_COLUMNS = schema.STEPS.names.index("histogram_min")
_N_LOGITS_COLUMNS = len(schema.STEPS.names) - _FIRST_LOGITS_COLUMN
_TRAINING_GRAD_COLUMNS = schema.GRADS.names[3 : schema.GRADS.names.index("n_inf") + 1]
"""Columns of `grads` that a training step fills in, after the key."""

# What is written at every step, without a look at the kinds of columns: an attrgetter reads all
# fields of a record in C.
_call_values = attrgetter(*schema.CALLS.names[4:])
_build_values = attrgetter(*schema.BUILDS.names[4:])
_stat_values = attrgetter(*schema.LAYER_STATS.names[4:])
_candidate_values = attrgetter(*schema.CANDIDATES.names[3:])
_memory_values = attrgetter(*schema.MEMORY.names[3:])
_mask_values = attrgetter(*schema.MASKS.names[3:-1])
_parameter_values = attrgetter(*schema.GRADS.names[3:])
_training_gradient_values = attrgetter(*_TRAINING_GRAD_COLUMNS)
_gradient_values = attrgetter(*schema.GRADIENTS.names[3:])
_token_values = attrgetter(*schema.TOKENS.names[2:-2])
_step_values = attrgetter(*schema.STEPS.names[: schema.STEPS.names.index("first_pos")])
_logits_values = attrgetter(*schema.STEPS.names[_FIRST_LOGITS_COLUMN:-1])


def encode_step(record: StepRecord, known_masks: Collection[str]) -> list[Statement]:
    """Return the statements of a step, without masks whose fingerprint is in `known_masks`."""
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
        out += encode_training_step(key, record.training)
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
    out: list[Statement] = []
    _add_insert(out, schema.GENERATIONS, _encode_row(schema.GENERATIONS, record), 1)
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
    row = BranchRow(
        generation=generation,
        branch=branch,
        parent=parent,
        fork_step=fork_step,
        state="recording",
        answer="",
        stop_reason="",
        started_at=at,
        ended_at=None,
        change=change or {},
    )
    return [(insert_sql(schema.BRANCHES, 1), _encode_row(schema.BRANCHES, row))]


def encode_generation_end(record: GenerationEnd) -> list[Statement]:
    """Return the statements that end a branch of a generation and replace its segments."""
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
    for number, record in enumerate(records):
        kind = getattr(record.kind, "value", record.kind)  # sqlite3 is slow with an enum
        flat += (*which, number)
        flat += _encode_row(schema.SEGMENTS, record, skip=3, kind=kind)
        n_rows += 1
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
    """Add the statements of findings. Those of a step (`key`) take their place from it."""
    for record in records:
        generation, branch, step = record.generation, record.branch, record.step
        if key is not None:
            generation, branch, step = *key[:2], key[2] if step is None else step
        row = _encode_row(
            schema.FINDINGS,
            record,
            skip=1,
            generation=generation,
            branch=branch,
            step=step,
            severity=str(record.severity.value),
        )
        out.append((insert_sql(schema.FINDINGS, 1, skip=1), row))


def encode_repeats(out: list[Statement], records: Iterable[Repeat], key: RowKey) -> None:
    """Add the statements that count findings of earlier steps again in this step."""
    generation, branch, step = key
    for record in records:
        news = (record.sentence or None, to_json(record.evidence) if record.evidence else None)
        within = generation if record.generation is None else record.generation
        row = [step, *news, within, branch, record.id, record.series]
        out.append((schema.REPEAT_FINDING, row))


def encode_review(rule: str, generation: int, at: float, wall_ms: float) -> Statement:
    """Return the statement that records that a rule has reviewed a generation."""
    row = [rule, generation, at, wall_ms]
    return insert_sql(schema.REVIEWS, 1), row


def encode_events(
    out: list[Statement], records: Iterable[EventRecord], key: RowKey | None = None
) -> None:
    """Add the statements of events. Those of a step (`key`) take missing places from it."""
    for record in records:
        generation, branch, step = record.generation, None, record.step
        if key is not None:
            generation = key[0] if generation is None else generation
            branch, step = key[1], key[2] if step is None else step
        row = _encode_row(
            schema.EVENTS, record, skip=1, generation=generation, branch=branch, step=step
        )
        out.append((insert_sql(schema.EVENTS, 1, skip=1), row))


def encode_output(out: list[Statement], records: Iterable[OutputRecord]) -> None:
    """Add the statements of what the program printed."""
    for record in records:
        row = _encode_row(schema.OUTPUT, record, skip=1)
        out.append((insert_sql(schema.OUTPUT, 1, skip=1), row))


def _encode_row(table: Table, record: Any, *, skip: int = 0, **values: Any) -> list[Any]:
    """Return the columns of a row after the first `skip`: the fields of the same names.

    `values` replace fields and are stored as they are.
    """
    return [
        values[column.name]
        if column.name in values
        else _WRITERS_BY_KIND.get(column.kind, _as_is)(getattr(record, column.name))
        for column in table.columns[skip:]
    ]


def _as_is(value: Any) -> Any:
    return value


def _add_step_row(out: list[Statement], record: StepRecord) -> None:
    logits = record.logits
    row = [*_step_values(record), *_position_bounds(record.tokens)]
    if logits is None:
        row += (None,) * _N_LOGITS_COLUMNS
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
            row = tuple(map(_nan_as_text, row))
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

    for name in MASK_ARRAYS:
        array = getattr(mask, name)
        if array is not None:
            yield f"mask.{name}", encode_array(array)


def _add_array_rows(
    flat: list[Any], key: Sequence[int], what: Sequence[Any], stored: EncodedArray
) -> None:
    form = (stored.dtype, stored.item, stored.shape, stored.codec)
    for number, data in enumerate(stored.chunks):
        flat += (*key, number, *what, *form, zlib.crc32(data), data)


def _nan_as_text(value: Any) -> Any:
    """SQLite would store a NaN as NULL, which means "none" in a column of kind "real?"."""
    return "nan" if value != value else value


_WRITERS_BY_KIND: dict[str, Callable[[Any], Any]] = {
    "bool": int,
    "real?": _nan_as_text,
    "json": to_json,
    "json?": lambda value: None if value is None else to_json(value),
}
"""What makes a field into a value of a column, for kinds that do not store it as it is."""


def _add_insert(
    out: list[Statement],
    table: Table,
    flat: list[Any],
    n_rows: int,
    *,
    batch: int = MAX_ROWS_PER_INSERT,
) -> None:
    """Add the INSERT of `n_rows` rows, whose values follow each other in `flat`."""
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


SqlRow = Sequence[Any]
E = TypeVar("E", bound=Enum)
R = TypeVar("R")


class DamagedValueError(Exception):
    """A stored value that cannot have been recorded; the reader raises a `TraceError` for it."""


def decode_row(table: Table, row: SqlRow, *, skip: int = 0) -> list[Any]:
    """Return the values of a row, NaN and JSON restored.

    Raises `DamagedValueError` for a wrong type.

    `row` begins with the column number `skip` of the table and may stop before its end.
    """
    return decode_values(table.kinds(skip=skip), row, table.name)


def decode_int(value: Any) -> int:
    """Return a value that must be an integer. Raises `DamagedValueError`."""
    if type(value) is not int:
        raise DamagedValueError(f"an integer is expected, not {value!a}")
    return value


def decode_values(kinds: Sequence[str], row: SqlRow, name: str) -> list[Any]:
    """Return the values of a row of these kinds, or of the first of them.

    Raises `DamagedValueError` for a wrong type.
    """
    try:
        return [_READERS_BY_KIND[kind](value) for kind, value in zip(kinds, row, strict=False)]
    except (ValueError, TypeError) as error:
        raise DamagedValueError(
            f"a row of {name} holds a value of a wrong type ({error})"
        ) from None


def decode_column(kind: str, values: SqlRow, name: str) -> list[Any]:
    """Return the values of a column of the table `name`, NaN restored, JSON as the text it is.

    Raises `DamagedValueError` for a wrong type.
    """
    read = _READERS_BY_KIND[kind.replace("json", "text")]
    try:
        return [read(value) for value in values]
    except (ValueError, TypeError) as error:
        raise DamagedValueError(
            f"a row of {name} holds a value of a wrong type ({error})"
        ) from None


def _reader_of_types(*types: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"a {type(value).__name__}")
        return value

    return read


def _read_real(value: Any) -> float:
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    raise ValueError(f"a {type(value).__name__}")


def _read_optional_real(value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if type(value) is int:  # an ANY column keeps an int as one
        return float(value)
    if value == "nan":
        return math.nan
    raise ValueError(f"a {type(value).__name__}")


def _read_bool(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError("neither 0 nor 1")
    return bool(value)


def _read_json(value: Any) -> Any:
    return from_json(_READERS_BY_KIND["text"](value))


_READERS_BY_KIND: dict[str, Callable[[Any], Any]] = {
    "int": _reader_of_types(int),
    "int?": _reader_of_types(int, type(None)),
    "bool": _read_bool,
    "real": _read_real,
    "real?": _read_optional_real,
    "text": _reader_of_types(str),
    "text?": _reader_of_types(str, type(None)),
    "json": _read_json,
    "json?": lambda value: None if value is None else _read_json(value),
    "blob": _reader_of_types(bytes),
}


def _record_decoder(
    record: type[R],
    table: Table,
    *,
    skip: int,
    stop: int | None = None,
    **converters: Callable[[Any], Any],
) -> Callable[[SqlRow], R]:
    """Return a function that makes a record of the cleaned columns `skip` to `stop` of a row.

    These columns must be the first fields of the record, by name and in order, which is checked
    here once, so that a row is passed by position. `converters` are by column.
    """
    names = table.names[skip:stop]
    if names != tuple(field.name for field in fields(cast(Any, record)))[: len(names)]:
        raise TypeError(f"the columns of {table.name} are not the fields of {record.__name__}")
    conversions = [(names.index(name), convert) for name, convert in converters.items()]

    def decode(values: SqlRow) -> R:
        if not conversions:
            return record(*values)
        row = list(values)
        for index, convert in conversions:
            row[index] = convert(row[index])
        return record(*row)

    return decode


def _named(table: Table, values: SqlRow, *, skip: int = 0) -> dict[str, Any]:
    """Return the values of a row after the first `skip` columns by the names of their columns."""
    return dict(zip(table.names[skip:], values, strict=True))


def _check_enum(kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise DamagedValueError(f"{value!r} is not a {kind.__name__}") from None


def _check_list(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise DamagedValueError(f"a list of {kind.__name__} holds something else")
    return value


def _check_ints(value: Any) -> tuple[int, ...]:
    return tuple(_check_list(value, int))


def _check_position_runs(value: Any) -> tuple[tuple[int, ...], ...]:
    runs = tuple(_check_ints(run) for run in _check_list(value, list))
    if any(len(run) != 2 for run in runs):
        raise DamagedValueError("a run of position ids is not a pair")
    return runs


def _check_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DamagedValueError("an object holds something else")
    return value


def _check_flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _check_segment_kind(value: str) -> SegmentKind:
    return _check_enum(SegmentKind, value)


# Each takes the cleaned columns after those that `skip` leaves out.
decode_token = _record_decoder(TokenRecord, schema.TOKENS, skip=2)
decode_segment = _record_decoder(Segment, schema.SEGMENTS, skip=3, kind=_check_segment_kind)
decode_branch = _record_decoder(BranchRow, schema.BRANCHES, skip=0, change=_check_dict)
decode_candidate = _record_decoder(Candidate, schema.CANDIDATES, skip=3)
decode_inputs = _record_decoder(
    InputsRecord,
    schema.INPUTS,
    skip=3,
    positions=_check_position_runs,
    cached_before=_check_ints,
    cached_after=_check_ints,
)
decode_call = _record_decoder(CallRecord, schema.CALLS, skip=4, causal=_check_flag)
decode_build = _record_decoder(BuildRecord, schema.BUILDS, skip=4)
decode_layer_stat = _record_decoder(LayerStatRecord, schema.LAYER_STATS, skip=4)
decode_memory = _record_decoder(MemoryRecord, schema.MEMORY, skip=3)
decode_gradient_stat = _record_decoder(GradientStat, schema.GRADS, skip=3)
decode_mask = _record_decoder(MaskRecord, schema.MASKS, skip=3)
_decode_step_row = _record_decoder(StepRow, schema.STEPS, skip=0, stop=_HISTOGRAM_COLUMNS)


def decode_generation(values: SqlRow) -> GenerationRow:
    """Return a generation from all its cleaned columns, then all of its first branch."""
    n_columns = len(schema.GENERATIONS.columns)
    first_branch = decode_branch(values[n_columns:])
    row = _named(schema.GENERATIONS, values[:n_columns])
    row["expected"] = tuple(_check_list(row["expected"], str))
    row["declared"] = _check_dict(row["declared"])
    return GenerationRow(
        **row,
        state=first_branch.state,
        answer=first_branch.answer,
        stop_reason=first_branch.stop_reason,
        ended_at=first_branch.ended_at,
    )


def decode_step(values: SqlRow) -> StepRow:
    """Return a step from its cleaned columns, at least those up to `n_inf`."""
    row = list(values[:_HISTOGRAM_COLUMNS])
    if not has_logits(values):
        row[_FIRST_LOGITS_COLUMN:] = [None] * (_HISTOGRAM_COLUMNS - _FIRST_LOGITS_COLUMN)
    return _decode_step_row(row)


def has_logits(values: SqlRow) -> bool:
    """Tell from the cleaned columns of a step whether its logits were captured."""
    return values[_CHOSEN_COLUMN] is not None


def decode_logits(values: SqlRow, candidates: tuple[Candidate, ...]) -> LogitsRecord:
    """Return the distribution of a step from all its cleaned columns."""
    row = _named(schema.STEPS, values[_FIRST_LOGITS_COLUMN:], skip=_FIRST_LOGITS_COLUMN)
    if None in row.values():
        raise DamagedValueError("a row of steps has only a part of its logits")
    row["histogram"] = _check_ints(row["histogram"])
    return LogitsRecord(**row, candidates=candidates)


def decode_gradients(
    values: SqlRow, stats: tuple[GradientStat, ...], arrays: dict[str, Array]
) -> GradientRecord:
    """Return a token's gradients from all its cleaned columns, its parameters and its arrays."""
    return GradientRecord(
        **_named(schema.GRADIENTS, values),
        stats=stats,
        tokens=arrays.get("grads.tokens"),
        layers=arrays.get("grads.layers"),
    )


def decode_finding(values: SqlRow) -> FindingRow:
    """Return a finding from all its cleaned columns."""
    row = _named(schema.FINDINGS, values)
    number = row.pop("finding")
    row["severity"] = _check_enum(Severity, row["severity"])
    row["positions"], row["layers"] = _check_ints(row["positions"]), _check_ints(row["layers"])
    row["evidence"] = _check_dict(row["evidence"])
    return FindingRow(number, Finding(**row))


def decode_event(values: SqlRow) -> EventRow:
    """Return an event from all its cleaned columns."""
    row = _named(schema.EVENTS, values)
    number, branch = row.pop("event"), row.pop("branch")
    row["data"] = _check_dict(row["data"])
    return EventRow(number, branch, EventRecord(**row))


def decode_output(values: SqlRow) -> OutputRow:
    """Return a piece of output from all its cleaned columns."""
    row = _named(schema.OUTPUT, values)
    return OutputRow(row.pop("number"), OutputRecord(**row))


def decode_array_info(values: SqlRow) -> ArrayInfo:
    """Return an array's facts from a row of `schema.LIST_ARRAYS`."""
    kinds = ("int", "text", "int?", "text", "json", "text", "int")
    number, stream, layer, dtype, shape, codec, n_bytes = decode_values(kinds, values, "arrays")
    return ArrayInfo(number, stream, layer, dtype, _check_ints(shape), codec, n_bytes)


def decode_chunk(values: SqlRow) -> ArrayChunk:
    """Return a chunk from dtype, item, shape (still text), codec, checksum and data."""
    from flexinspect.trace.arrays import ArrayChunk

    if [type(value) for value in values] != [str, str, str, str, int, bytes]:
        raise DamagedValueError("a row of arrays holds a value of a wrong type")
    return ArrayChunk(*values)


def encode_training_step(key: RowKey, record: TrainingStepRecord) -> list[Statement]:
    """Return the statements of a training step with its gradients."""
    out: list[Statement] = [
        (insert_sql(schema.TRAINING_STEPS, 1), [*key, *_training_values(record)])
    ]
    n_empty = len(schema.GRADS.columns) - len(key) - len(_TRAINING_GRAD_COLUMNS)
    for start in range(0, len(record.gradients), _MAX_GRADIENTS_PER_INSERT):
        part = record.gradients[start : start + _MAX_GRADIENTS_PER_INSERT]
        flat: list[Any] = []
        for gradient in part:
            flat += (*key, *_training_gradient_values(gradient), *(None,) * n_empty)
        out.append((insert_sql(schema.GRADS, len(part)), flat))
    return out


def _training_values(record: TrainingStepRecord) -> list[Any]:
    return _encode_row(
        schema.TRAINING_STEPS,
        record,
        skip=3,
        learning_rates=_floats_to_json(record.learning_rates),
        group_norms=_floats_to_json(record.group_norms),
        group_ratios=_floats_to_json(record.group_ratios),
        producer=None if record.producer is None else to_json(asdict(record.producer)),
    )


def _floats_to_json(values: Sequence[float]) -> str:
    if all(map(math.isfinite, values)):
        return str([*values])  # JSON already, at a third of the price
    return to_json([*values])


def decode_training_step(
    values: Sequence[Any], gradients: Sequence[ParameterGradient] = ()
) -> TrainingStepRecord:
    """Return a training step from the cleaned columns after its key. Raises `ValueError`."""
    row = _named(schema.TRAINING_STEPS, values, skip=3)
    for name in ("learning_rates", "group_norms", "group_ratios"):
        row[name] = _decode_floats(row[name])
    if row["producer"] is not None:
        row["producer"] = _decode_origin(row["producer"])
    return TrainingStepRecord(**row, gradients=tuple(gradients))


def decode_parameter_gradient(values: Sequence[Any]) -> ParameterGradient:
    """Return a parameter's gradient from the cleaned columns `name` to `n_inf`."""
    name, norm, largest, n_nan, n_inf = values
    is_missing = largest != largest and not n_nan
    return ParameterGradient(
        name, norm, None if is_missing else largest, n_nan, n_inf, group_of(name)
    )


def _decode_floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise ValueError("a list of numbers holds something else")
    return tuple(map(float, values))


def _decode_origin(value: Any) -> AnomalyOrigin:
    try:
        return AnomalyOrigin(**value)
    except TypeError as error:
        raise ValueError(f"not a producer ({error})") from None
