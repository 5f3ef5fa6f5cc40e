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
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from msgspec import Struct
from msgspec.structs import asdict, replace

from flexinspect.records import step as step_records
from flexinspect.records import training_step
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.training_step import AnomalyOrigin, ParameterGradient
from flexinspect.trace import query_results, schema
from flexinspect.trace.query_results import BranchRow, EventRow, FindingRow, OutputRow
from flexinspect.trace.schema import Table, insert_sql

if TYPE_CHECKING:
    from flexinspect.trace.arrays import ArrayChunk

_FLOAT = "$float"
_DEPTH = 40


def to_json(value: Any) -> str:
    """Return strict JSON of `value`; never raises, because a recording must continue.

    Non-finite floats become `{"$float": "NaN"}` (or "Infinity", "-Infinity"), tuples, sets and
    numpy arrays become lists, numpy scalars numbers, anything else its `str`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_with_tagged_floats)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(_with_tagged_floats(value), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text))  # a lone surrogate needs an escape
    return text


def from_json(text: str) -> Any:
    """Return the value that `to_json` wrote, tuples as lists. Raises `ValueError` if damaged."""
    try:
        return json.loads(text, object_hook=_untag)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def plain_json(value: Any, *, ensure_ascii: bool = True) -> str:
    """Return JSON for other programs: non-finite floats are "NaN", "Infinity", "-Infinity".

    ASCII keeps control characters of a token from reaching a terminal.
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=ensure_ascii)
    except ValueError:
        simple = simplify(value, float_name)
        return json.dumps(simple, allow_nan=False, ensure_ascii=ensure_ascii)


def float_name(value: float) -> str:
    """Return the name of a non-finite float, in the spelling that `float()` reads."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def simplify(value: Any, on_float: Callable[[float], Any], depth: int = 0) -> Any:
    """Return `value` as dicts, lists, strings and numbers, with `on_float` of non-finite floats."""
    if depth > _DEPTH:
        return repr(type(value))
    if _is_numpy(value):
        value = value.tolist()
    elif isinstance(value, Struct):
        value = asdict(value)
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


_with_tagged_floats = partial(simplify, on_float=lambda value: {_FLOAT: float_name(value)})


def bindable(value: Any) -> Any:
    """Return a replacement that SQLite accepts for a parameter that it refused.

    numpy scalars become numbers, integers beyond 64 bits and unknown objects become text, and lone
    surrogates, which UTF-8 cannot encode, become backslash escapes.
    """
    if _is_numpy(value, scalar=True):
        value = value.item()
    if value is None or isinstance(value, float | bytes | bytearray | memoryview):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    return str(value).encode("utf-8", "backslashreplace").decode()


def _untag(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


Statement = tuple[str, Sequence[Any]]  # SQL and its parameters
RowKey = tuple[int, int, int]  # generation, branch, step
SqlRow = Sequence[Any]
E = TypeVar("E", bound=Enum)
R = TypeVar("R")

MAX_POSITION = 1 << 40
"""Positions beyond this are damage, not a sequence."""
MAX_ROWS_PER_INSERT = 128
"""Rows in one statement at most; keeps the number of parameters below SQLite's limit."""

_MAX_ARRAYS_PER_INSERT = 8


# -- values of columns ----------------------------------------------------------------------------


class DamagedValueError(Exception):
    """A stored value that cannot have been recorded; the reader raises a `TraceError` for it."""


_NAN_TEXT = "nan"
"""A NaN in a column of kind "real?", because NULL, as which SQLite would store it, means "none"."""


def decode_int(value: Any) -> int:
    """Return a value that must be an integer. Raises `DamagedValueError`."""
    if type(value) is not int:
        raise DamagedValueError(f"an integer is expected, not {value!a}")
    return value


MAX_STEP = 10**8
"""Steps that a branch has at most: a range of numbers that is searched piece by piece is finite."""


def decode_step_number(value: Any) -> int:
    """Return the number of a step. Raises `DamagedValueError` for one that no run reaches."""
    if not 0 <= decode_int(value) <= MAX_STEP:
        raise DamagedValueError(f"a step has the number {value}")
    return int(value)


def decode_values(kinds: Sequence[str], row: SqlRow, name: str) -> list[Any]:
    """Return the values of a row of these kinds, or of the first of them, NaN and JSON restored.

    Raises `DamagedValueError` for a wrong type.
    """
    try:
        return [_READERS_BY_KIND[kind](value) for kind, value in zip(kinds, row, strict=False)]
    except (ValueError, TypeError) as error:
        what = f"a row of {name} holds a value of a wrong type ({error})"
        raise DamagedValueError(what) from None


def _reader_of_types(*types: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"a {type(value).__name__}")
        return value

    return read


def _read_real(value: Any) -> float:
    if type(value) in (float, int):  # an ANY column keeps an int as one
        return float(value)
    if value == _NAN_TEXT:
        return math.nan
    raise ValueError(f"a {type(value).__name__}")


def _read_length(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= schema.MAX_LENGTH:
        raise ValueError(f"{value!a:.40} is not a length")
    return value


def _read_bool(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError("neither 0 nor 1")
    return bool(value)


def _read_json(value: Any) -> Any:
    return from_json(_READERS_BY_KIND["text"](value))


def _read_list(value: Any, *types: type) -> list[Any]:
    return _check_list(_read_json(value), *types)


def _check_list(value: Any, *types: type) -> list[Any]:
    if not isinstance(value, list) or any(type(item) not in types for item in value):
        raise DamagedValueError(f"a list of {types[-1].__name__} holds something else")
    return value


def _read_runs(value: Any) -> tuple[tuple[int, ...], ...]:
    runs = tuple(tuple(_check_list(run, int)) for run in _read_list(value, list))
    if any(len(run) != 2 for run in runs):
        raise DamagedValueError("a run of position ids is not a pair")
    return runs


def _read_object(value: Any) -> dict[str, Any]:
    found = _read_json(value)
    if not isinstance(found, dict):
        raise DamagedValueError("an object holds something else")
    return found


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READERS_BY_KIND: dict[str, Callable[[Any], Any]] = {
    "int": _reader_of_types(int),
    "int?": _reader_of_types(int, type(None)),
    "length": _read_length,
    "length?": lambda value: None if value is None else _read_length(value),
    "bool": _read_bool,
    "real": lambda value: math.nan if value is None else _read_real(value),
    "real?": lambda value: None if value is None else _read_real(value),
    "text": _reader_of_types(str),
    "text?": _reader_of_types(str, type(None)),
    "json": _read_json,
    "object": _read_object,
    "texts": lambda value: tuple(_read_list(value, str)),
    "ints": lambda value: tuple(_read_list(value, int)),
    "floats": lambda value: tuple(map(float, _read_list(value, int, float))),
    "runs": _read_runs,
    "blob": _reader_of_types(bytes),
}
_READERS_BY_KIND |= {f"{kind}?": _or_none(_READERS_BY_KIND[kind]) for kind in schema.NULLABLE_KINDS}


# The text of a list of numbers is JSON already, at a third of the price of `json.dumps`.
_WRITERS_BY_KIND: dict[str, Callable[[Any], Any]] = {
    "bool": int,
    "real?": lambda value: _NAN_TEXT if value != value else value,
    **dict.fromkeys(schema.JSON_KINDS, to_json),
    "ints": lambda values: str([*map(int, values)]),
    "floats": lambda values: (
        str([*values]) if all(map(math.isfinite, values)) else to_json([*values])
    ),
    "runs": lambda values: str([[int(first), int(n)] for first, n in values]),
}
"""What makes a field into a value of a column, for kinds that do not store it as it is."""
_WRITERS_BY_KIND |= {f"{kind}?": _or_none(_WRITERS_BY_KIND[kind]) for kind in schema.NULLABLE_KINDS}


# -- rows of tables -------------------------------------------------------------------------------


class RowFormat(Generic[R]):
    """How records of one class are the rows of a table: columns are fields of the same name.

    Columns before `skip` are the key of the row, and those from `stop` on are not of the record:
    NULL when it is written. `conversions` are for columns whose field has a type of its own: a
    function for writing and one for reading.
    """

    def __init__(
        self,
        record: type[R],
        table: Table,
        *,
        skip: int = 0,
        stop: int | None = None,
        **conversions: tuple[Callable[[Any], Any], Callable[[Any], Any]],
    ) -> None:
        self.table, self.skip = table, skip
        self._record = record
        self._names = table.names[skip:stop]
        self._kinds = tuple(table.kinds.values())[skip:]
        fields_ = cast(Any, record).__struct_fields__
        if not {*fields_}.issuperset(self._names):
            raise TypeError(f"the columns of {table.name} are not the fields of {record.__name__}")
        self._is_positional = self._names == fields_[: len(self._names)]
        kinds = {name: table.kinds[name] for name in self._names}
        writers = {n: _WRITERS_BY_KIND[k] for n, k in kinds.items() if k in _WRITERS_BY_KIND}
        writers |= {name: write for name, (write, _) in conversions.items()}
        self._writers = [(self._names.index(name), write) for name, write in writers.items()]
        self._readers = [(self._names.index(n), read) for n, (_, read) in conversions.items()]
        self._padding = (None,) * (len(table.kinds) - skip - len(kinds))
        # An attrgetter reads all fields of a record in C; this runs at every step.
        self._get_values = attrgetter(*self._names)
        self.encode: Callable[[Any], Sequence[Any]] = (
            self._encode_converted if self._writers or self._padding else self._get_values
        )
        """Returns the columns from `skip` on of anything that has the fields."""

    def _encode_converted(self, record: Any) -> Sequence[Any]:
        row = [*self._get_values(record), *self._padding]
        for index, write in self._writers:
            row[index] = write(row[index])
        return row

    def read_values(self, row: SqlRow) -> list[Any]:
        """Return the values of the columns from `skip` on, of which the last may be missing."""
        return decode_values(self._kinds, row, self.table.name)

    def decode(self, row: SqlRow, **others: Any) -> R:
        """Return the record of a row; `others` are its fields that are no columns."""
        return self.build(self.read_values(row), **others)

    def build(self, values: list[Any], **others: Any) -> R:
        """Return the record of values that `read_values` returned."""
        for index, read in self._readers:
            values[index] = read(values[index])
        if self._is_positional:
            return self._record(*values, **others)
        return self._record(**dict(zip(self._names, values, strict=True)), **others)


def _enum_conversion(kind: type[E]) -> tuple[Callable[[Any], str], Callable[[str], E]]:
    def read(value: str) -> E:
        try:
            return kind(value)
        except ValueError:
            raise DamagedValueError(f"{value!r} is not a {kind.__name__}") from None

    return str, read


def _read_origin(value: Mapping[str, Any]) -> AnomalyOrigin:
    try:
        return AnomalyOrigin(**value)
    except TypeError as error:
        raise DamagedValueError(f"not an anomaly origin ({error})") from None


_FIRST_LOGITS_COLUMN = schema.STEPS.names.index("entropy")
_CHOSEN_COLUMN = schema.STEPS.names.index("chosen_id")
_HISTOGRAM_COLUMNS = schema.STEPS.names.index("histogram_min")

GENERATION_ROWS = RowFormat(query_results.GenerationRow, schema.GENERATIONS)
BRANCH_ROWS = RowFormat(BranchRow, schema.BRANCHES)
SEGMENT_ROWS = RowFormat(Segment, schema.SEGMENTS, skip=3, kind=_enum_conversion(SegmentKind))
TOKEN_ROWS = RowFormat(step_records.TokenRecord, schema.TOKENS, skip=2)
CANDIDATE_ROWS = RowFormat(step_records.Candidate, schema.CANDIDATES, skip=3)
INPUTS_ROWS = RowFormat(step_records.InputsRecord, schema.INPUTS, skip=3)
CALL_ROWS = RowFormat(step_records.CallRecord, schema.CALLS, skip=4)
BUILD_ROWS = RowFormat(step_records.BuildRecord, schema.BUILDS, skip=4)
LAYER_STAT_ROWS = RowFormat(step_records.LayerStatRecord, schema.LAYER_STATS, skip=4)
MEMORY_ROWS = RowFormat(step_records.MemoryRecord, schema.MEMORY, skip=3)
GPU_ROWS = RowFormat(step_records.GpuRecord, schema.GPUS, skip=3)
LENS_ROWS = RowFormat(step_records.LensRecord, schema.LENS, skip=3)
MASK_ROWS = RowFormat(step_records.MaskRecord, schema.MASKS, skip=3)
GRADIENT_ROWS = RowFormat(step_records.GradientRecord, schema.GRADIENTS)
GRADIENT_STAT_ROWS = RowFormat(step_records.GradientStat, schema.GRADS, skip=3)
TRAINING_ROWS = RowFormat(
    training_step.TrainingStepRecord,
    schema.TRAINING_STEPS,
    skip=3,
    anomaly_origin=(_or_none(lambda origin: to_json(asdict(origin))), _or_none(_read_origin)),
)
_OUTPUT_ROWS = RowFormat(step_records.OutputRecord, schema.OUTPUT, skip=1)
_PARAMETER_ROWS = RowFormat(ParameterGradient, schema.GRADS, skip=3, stop=8)
_FINDING_ROWS = RowFormat(Finding, schema.FINDINGS, skip=1, severity=_enum_conversion(Severity))
_EVENT_ROWS = RowFormat(step_records.EventRecord, schema.EVENTS, skip=4)
_STEP_ROWS = RowFormat(query_results.StepRow, schema.STEPS, stop=_HISTOGRAM_COLUMNS)
_LOGITS_ROWS = RowFormat(step_records.LogitsRecord, schema.STEPS, skip=_FIRST_LOGITS_COLUMN)
_STEP_COLUMN = schema.STEPS.names.index("step")
STEP_SCALARS = schema.STEPS.names[: schema.STEPS.names.index("first_pos")]
_step_values = attrgetter(*STEP_SCALARS)


def _insert(rows: RowFormat[Any], key: Sequence[Any], records: Sequence[Any]) -> list[Statement]:
    """Return the INSERTs of records, numbered from 0 if their table has a column for it.

    `key` may have more values than the rows need.
    """
    n_key = rows.skip - rows.table.is_numbered_by_sqlite
    is_numbered = n_key > len(key)
    flat: list[Any] = []
    for number, record in enumerate(records):
        flat += (*key, number) if is_numbered else key[:n_key]
        flat += rows.encode(record)
    return _insert_values(rows.table, flat)


def _insert_values(
    table: Table, flat: list[Any], *, batch: int = MAX_ROWS_PER_INSERT
) -> list[Statement]:
    """Return the INSERTs of rows, whose values follow each other in `flat`."""
    skip = int(table.is_numbered_by_sqlite)
    width = len(table.kinds) - skip
    size = batch * width
    parts = [flat[i : i + size] for i in range(0, len(flat), size)] if len(flat) > size else [flat]
    return [(insert_sql(table, len(part) // width, skip=skip), part) for part in parts if part]


# -- statements that write records ----------------------------------------------------------------


def encode_step(record: step_records.StepRecord, known_masks: Collection[str]) -> list[Statement]:
    """Return the statements of a step, without masks whose fingerprint is in `known_masks`."""
    key = (record.generation, record.branch, record.step)
    logits, training = record.logits, record.training
    positions = [token.pos for token in record.tokens]
    row = [*_step_values(record), min(positions, default=None), max(positions, default=None)]
    row += _LOGITS_ROWS.encode(logits) if logits else (None,) * (len(schema.STEPS.names) - len(row))
    out = _insert_values(schema.STEPS, row)
    for rows, records in (
        (TOKEN_ROWS, record.tokens),
        (CANDIDATE_ROWS, logits.candidates if logits else ()),
        (INPUTS_ROWS, (record.inputs,) if record.inputs else ()),
        (CALL_ROWS, record.calls),
        (BUILD_ROWS, record.builds),
        (LAYER_STAT_ROWS, record.layer_stats),
        (MEMORY_ROWS, (record.memory,) if record.memory else ()),
        (GPU_ROWS, record.gpus),
        (LENS_ROWS, record.lens),
        (TRAINING_ROWS, (training,) if training else ()),
        (_PARAMETER_ROWS, training.gradients if training else ()),
    ):
        if records:
            out += _insert(rows, key, records)
    if record.masks or record.arrays:
        out += _insert_masks_and_arrays(key, record, known_masks)
    out += encode_findings(record.findings, key)
    out += encode_repeats(record.repeats, key)
    out += encode_events(record.events, key)
    return out


def _insert_masks_and_arrays(
    key: RowKey, record: step_records.StepRecord, known_masks: Collection[str]
) -> list[Statement]:
    masks = {m.fingerprint: m for m in record.masks if m.fingerprint not in known_masks}
    arrays: list[tuple[Any, ...]] = [
        (f"mask.{name}", None, mask.fingerprint, getattr(mask, name), None)
        for mask in masks.values()
        for name in step_records.MASK_ARRAYS
    ]
    arrays += ((each.stream, each.layer, None, each.array, each.dtype) for each in record.arrays)
    return _insert(MASK_ROWS, key, [*masks.values()]) + _insert_arrays(key, arrays)


def _insert_arrays(
    key: RowKey, arrays: Iterable[tuple[Any, ...]], first_number: int = 0
) -> list[Statement]:
    """Return the INSERTs of arrays (stream, layer, owner, array, dtype), without None."""
    from flexinspect.trace.arrays import encode_array

    flat: list[Any] = []
    present = (each for each in arrays if each[3] is not None)
    for number, (*about, array, dtype) in enumerate(present, first_number):
        form, chunks = encode_array(array, dtype)
        for chunk, data in enumerate(chunks):
            flat += (*key, number, chunk, *about, *form, zlib.crc32(data), data)
    return _insert_values(schema.ARRAYS, flat, batch=_MAX_ARRAYS_PER_INSERT)


def encode_gradients(record: step_records.GradientRecord) -> list[Statement]:
    """Return the statements of a token's gradients; its step may have been written long ago."""
    key = (record.generation, record.branch, record.step)
    names = ("tokens", "layers")
    arrays = ((f"grads.{name}", None, None, getattr(record, name), None) for name in names)
    return [
        *_insert(GRADIENT_ROWS, (), (record,)),
        *_insert(GRADIENT_STAT_ROWS, key, record.stats),
        *_insert_arrays(key, arrays, schema.FIRST_GRADIENT_ARRAY),
    ]


def encode_generation_start(record: step_records.GenerationRecord) -> list[Statement]:
    """Return the statements of a new generation with its first branch."""
    place = (record.generation, 0)
    return [
        *_insert(GENERATION_ROWS, (), (record,)),
        *encode_branch_start(*place, None, None, record.started_at, segments=record.segments),
        *_insert(TOKEN_ROWS, place, record.tokens),
    ]


def encode_branch_start(
    generation: int,
    branch: int,
    parent: int | None,
    fork_step: int | None,
    at: float,
    change: Mapping[str, Any] | None = None,
    segments: Sequence[Segment] = (),
) -> list[Statement]:
    """Return the statements of a new branch."""
    place, state = (generation, branch, parent, fork_step), ("recording", "", "")
    row = BranchRow(*place, *state, started_at=at, ended_at=None, change=change or {})
    return _insert(BRANCH_ROWS, (), (row,)) + _insert(SEGMENT_ROWS, place[:2], segments)


def encode_generation_end(record: step_records.GenerationEnd) -> list[Statement]:
    """Return the statements that end a branch of a generation and replace its segments."""
    which = (record.generation, record.branch)
    ended_at = _WRITERS_BY_KIND["real?"](record.ended_at)
    how = (record.state, record.answer, record.stop_reason, ended_at)
    out: list[Statement] = [(schema.END_BRANCH, [*how, *which])]
    if record.segments:
        out.append((schema.DROP_SEGMENTS, which))
    return out + _insert(SEGMENT_ROWS, which, record.segments)


def encode_trace_end(state: str, facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that end a trace: branches still open end in `state`."""
    out: list[Statement] = [(schema.END_OPEN_BRANCHES, [state, time.time()])]
    return out + encode_run_facts({**facts, "state": state})


def encode_run_facts(facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that set facts of the manifest."""
    return [(schema.SET_FACT, (str(key), to_json(value))) for key, value in facts.items()]


def encode_findings(records: Iterable[Finding], key: RowKey | None = None) -> list[Statement]:
    """Return the statements of findings. Those of a step (`key`) take their place from it."""
    if key is not None:
        generation, branch, own = key
        steps = ((each, own if each.step is None else each.step) for each in records)
        records = [replace(r, generation=generation, branch=branch, step=s) for r, s in steps]
    return _insert(_FINDING_ROWS, (), [*records])


def encode_repeats(records: Iterable[Repeat], key: RowKey) -> list[Statement]:
    """Return the statements that count findings of earlier steps again in this step."""
    generation, branch, step = key
    out: list[Statement] = []
    for record in records:
        news = (record.sentence or None, to_json(record.evidence) if record.evidence else None)
        within = generation if record.generation is None else record.generation
        which = (within, branch, record.id, record.series)
        out.append((schema.REPEAT_FINDING, [step, *news, *which]))
    return out


def encode_explanation(finding: Finding) -> list[Statement]:
    """Return the statement that sets severity, sentence and evidence of a stored finding."""
    place = (finding.generation, finding.branch, finding.id, finding.step, finding.layer)
    news = (finding.severity.value, finding.sentence, to_json(finding.evidence))
    return [(schema.EXPLAIN_FINDING, [*news, *place, finding.series])]


def encode_events(
    records: Iterable[step_records.EventRecord], key: RowKey | None = None
) -> list[Statement]:
    """Return the statements of events. Those of a step (`key`) take missing places from it."""
    out: list[Statement] = []
    for record in records:
        generation, branch, step = record.generation, None, record.step
        if key is not None:
            generation = key[0] if generation is None else generation
            branch, step = key[1], key[2] if step is None else step
        out += _insert(_EVENT_ROWS, (generation, branch, step), (record,))
    return out


def encode_output(records: Iterable[step_records.OutputRecord]) -> list[Statement]:
    """Return the statements of what the program printed."""
    return _insert(_OUTPUT_ROWS, (), [*records])


# -- records from rows ----------------------------------------------------------------------------


def decode_generation(row: SqlRow) -> query_results.GenerationRow:
    """Return a generation from its columns, then those of its first branch."""
    n_columns = len(schema.GENERATIONS.kinds)
    branch = BRANCH_ROWS.decode(row[n_columns:])
    names = ("state", "answer", "stop_reason", "ended_at")
    of_branch = {name: getattr(branch, name) for name in names}
    return GENERATION_ROWS.decode(row[:n_columns], **of_branch)


def check_segments(segments: Sequence[Segment]) -> None:
    """Raise `DamagedValueError` unless segments follow each other, each owned by one of them."""
    end = 0
    for each in segments:
        if not end <= each.start <= each.stop <= MAX_POSITION:
            what = f"the segment {each.label!a:.40} at {each.start} to {each.stop} is out of order"
            raise DamagedValueError(what)
        if not 0 <= each.owner < len(segments):
            raise DamagedValueError(f"a segment belongs to segment {each.owner}, which is missing")
        end = each.stop


def decode_step(row: SqlRow) -> query_results.StepRow:
    """Return a step from its columns, at least those up to `n_inf`."""
    values = _STEP_ROWS.read_values(row[:_HISTOGRAM_COLUMNS])
    if not 0 <= values[_STEP_COLUMN] <= MAX_STEP:
        decode_step_number(values[_STEP_COLUMN])
    if values[_CHOSEN_COLUMN] is None:
        values[_FIRST_LOGITS_COLUMN:] = [None] * (_HISTOGRAM_COLUMNS - _FIRST_LOGITS_COLUMN)
    return _STEP_ROWS.build(values)


def decode_logits(row: SqlRow) -> step_records.LogitsRecord | None:
    """Return the distribution of a step without its candidates, None if it was not captured."""
    if row[_CHOSEN_COLUMN] is None:
        return None
    values = _LOGITS_ROWS.read_values(row[_FIRST_LOGITS_COLUMN:])
    if None in values:
        raise DamagedValueError("a row of steps has only a part of its logits")
    return _LOGITS_ROWS.build(values, candidates=())


def decode_finding(row: SqlRow) -> FindingRow:
    """Return a finding from all its columns."""
    return FindingRow(decode_int(row[0]), _FINDING_ROWS.decode(row[1:]))


def decode_event(row: SqlRow) -> EventRow:
    """Return an event from all its columns."""
    kinds = ("int", "int?", "int?", "int?")
    number, generation, branch, step = decode_values(kinds, row[:4], "events")
    return EventRow(number, branch, _EVENT_ROWS.decode(row[4:], generation=generation, step=step))


def decode_output(row: SqlRow) -> OutputRow:
    """Return a piece of output from all its columns."""
    return OutputRow(decode_int(row[0]), _OUTPUT_ROWS.decode(row[1:]))


def decode_chunk(row: SqlRow) -> ArrayChunk:
    """Return a chunk from its number, dtype, item, shape (as text), codec, checksum and data."""
    from flexinspect.trace.arrays import ArrayChunk

    if [type(value) for value in row] != [int, str, str, str, str, int, bytes]:
        raise DamagedValueError("a row of arrays holds a value of a wrong type")
    return ArrayChunk(*row)


def decode_parameter_gradient(row: SqlRow) -> ParameterGradient:
    """Return a parameter's gradient from the columns `name` to `n_inf`."""
    name, norm, largest, n_nan, n_inf = _PARAMETER_ROWS.read_values(row)
    is_missing = largest != largest and not n_nan
    group = training_step.group_of(name)
    return ParameterGradient(name, norm, None if is_missing else largest, n_nan, n_inf, group)
