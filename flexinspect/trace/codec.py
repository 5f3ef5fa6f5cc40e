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
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    MASK_ARRAYS,
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

SqlRow = Sequence[Any]
E = TypeVar("E", bound=Enum)
R = TypeVar("R")

MAX_ROWS_PER_INSERT = 128
"""Rows in one statement at most; keeps the number of parameters below SQLite's limit."""

_MAX_ARRAYS_PER_INSERT = 8


# -- values of columns ----------------------------------------------------------------------------


class DamagedValueError(Exception):
    """A stored value that cannot have been recorded; the reader raises a `TraceError` for it."""


_NAN_TEXT = "nan"
"""A NaN in a column of kind "real?", because NULL, as which SQLite would store it, means "none"."""


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
    if kind.removesuffix("?") in schema.JSON_KINDS:
        kind = "text?" if kind.endswith("?") else "text"
    return decode_values((kind,) * len(values), values, name)


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
    if value == _NAN_TEXT:
        return math.nan
    raise ValueError(f"a {type(value).__name__}")


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
    "bool": _read_bool,
    "real": _read_real,
    "real?": _read_optional_real,
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


def _ints_to_json(values: Iterable[int]) -> str:
    return str([*map(int, values)])


def _floats_to_json(values: Sequence[float]) -> str:
    return str([*values]) if all(map(math.isfinite, values)) else to_json([*values])


def _runs_to_json(values: Iterable[Sequence[int]]) -> str:
    return str([[int(first), int(n)] for first, n in values])


_WRITERS_BY_KIND: dict[str, Callable[[Any], Any]] = {
    "bool": int,
    **dict.fromkeys(schema.JSON_KINDS, to_json),
    "ints": _ints_to_json,
    "floats": _floats_to_json,
    "runs": _runs_to_json,
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
        self.table, self.skip, self.stop = table, skip, stop
        self._record = record
        columns = table.columns[skip:stop]
        self._names = tuple(column.name for column in columns)
        fields_ = [field.name for field in fields(cast(Any, record))]
        if not {*fields_}.issuperset(self._names):
            raise TypeError(f"the columns of {table.name} are not the fields of {record.__name__}")
        self._is_positional = self._names == tuple(fields_[: len(self._names)])
        plain = {c.name: _WRITERS_BY_KIND[c.kind] for c in columns if c.kind in _WRITERS_BY_KIND}
        writers = plain | {name: write for name, (write, _) in conversions.items()}
        self._writers = [(self._names.index(name), write) for name, write in writers.items()]
        self._readers = [(self._names.index(n), read) for n, (_, read) in conversions.items()]
        self._nan_columns = [i for i, column in enumerate(columns) if column.kind == "real?"]
        self._padding = (None,) * (len(table.columns) - skip - len(columns))
        # An attrgetter reads all fields of a record in C; this runs at every step.
        self._get_values = attrgetter(*self._names)
        is_plain = not (self._writers or self._nan_columns or self._padding)
        self.encode: Callable[[Any], Sequence[Any]] = (
            self._get_values if is_plain else self._encode_converted
        )
        """Returns the columns from `skip` on of anything that has the fields."""

    def _encode_converted(self, record: Any) -> Sequence[Any]:
        row = [*self._get_values(record), *self._padding]
        for index, write in self._writers:
            row[index] = write(row[index])
        for index in self._nan_columns:
            if row[index] != row[index]:
                row[index] = _NAN_TEXT
        return row

    def decode(self, values: SqlRow, **others: Any) -> R:
        """Return the record of cleaned columns; `others` are its fields that are no columns."""
        if self._readers:
            values = [*values]
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


def _read_origin(value: Mapping[str, Any] | None) -> AnomalyOrigin | None:
    try:
        return None if value is None else AnomalyOrigin(**value)
    except TypeError as error:
        raise DamagedValueError(f"not an anomaly origin ({error})") from None


def _write_origin(origin: AnomalyOrigin | None) -> str | None:
    return None if origin is None else to_json(asdict(origin))


_FIRST_LOGITS_COLUMN = schema.STEPS.names.index("entropy")
_CHOSEN_COLUMN = schema.STEPS.names.index("chosen_id")
_HISTOGRAM_COLUMNS = schema.STEPS.names.index("histogram_min")
_N_LOGITS_COLUMNS = len(schema.STEPS.names) - _FIRST_LOGITS_COLUMN

GENERATION_ROWS = RowFormat(GenerationRow, schema.GENERATIONS)
BRANCH_ROWS = RowFormat(BranchRow, schema.BRANCHES)
SEGMENT_ROWS = RowFormat(Segment, schema.SEGMENTS, skip=3, kind=_enum_conversion(SegmentKind))
TOKEN_ROWS = RowFormat(TokenRecord, schema.TOKENS, skip=2)
CANDIDATE_ROWS = RowFormat(Candidate, schema.CANDIDATES, skip=3)
INPUTS_ROWS = RowFormat(InputsRecord, schema.INPUTS, skip=3)
CALL_ROWS = RowFormat(CallRecord, schema.CALLS, skip=4)
BUILD_ROWS = RowFormat(BuildRecord, schema.BUILDS, skip=4)
LAYER_STAT_ROWS = RowFormat(LayerStatRecord, schema.LAYER_STATS, skip=4)
MEMORY_ROWS = RowFormat(MemoryRecord, schema.MEMORY, skip=3)
MASK_ROWS = RowFormat(MaskRecord, schema.MASKS, skip=3)
GRADIENT_ROWS = RowFormat(GradientRecord, schema.GRADIENTS)
GRADIENT_STAT_ROWS = RowFormat(GradientStat, schema.GRADS, skip=3)
TRAINING_ROWS = RowFormat(
    TrainingStepRecord,
    schema.TRAINING_STEPS,
    skip=3,
    anomaly_origin=(_write_origin, _read_origin),
)
OUTPUT_ROWS = RowFormat(OutputRecord, schema.OUTPUT, skip=1)
_PARAMETER_ROWS = RowFormat(ParameterGradient, schema.GRADS, skip=3, stop=8)
_FINDING_ROWS = RowFormat(Finding, schema.FINDINGS, skip=4, severity=_enum_conversion(Severity))
_EVENT_ROWS = RowFormat(EventRecord, schema.EVENTS, skip=4)
_STEP_ROWS = RowFormat(StepRow, schema.STEPS, stop=_HISTOGRAM_COLUMNS)
_LOGITS_ROWS = RowFormat(LogitsRecord, schema.STEPS, skip=_FIRST_LOGITS_COLUMN)
_step_values = attrgetter(*schema.STEPS.names[: schema.STEPS.names.index("first_pos")])


def _add_rows(
    out: list[Statement], rows: RowFormat[Any], key: Sequence[Any], records: Sequence[Any]
) -> None:
    """Add the INSERT of records, numbered from 0 if their table has a column for it."""
    first = 1 if rows.table.is_numbered_by_sqlite else 0
    is_numbered = rows.skip - first > len(key)
    flat: list[Any] = []
    for number, record in enumerate(records):
        flat += (*key, number) if is_numbered else key
        flat += rows.encode(record)
    _add_insert(out, rows.table, flat, len(records))


def _add_insert(
    out: list[Statement],
    table: Table,
    flat: list[Any],
    n_rows: int,
    *,
    batch: int = MAX_ROWS_PER_INSERT,
) -> None:
    """Add the INSERT of `n_rows` rows, whose values follow each other in `flat`."""
    skip = 1 if table.is_numbered_by_sqlite else 0
    width = len(table.columns) - skip
    for start in range(0, n_rows, batch):
        n = min(batch, n_rows - start)
        part = flat if n == n_rows else flat[start * width : (start + n) * width]
        out.append((insert_sql(table, n, skip=skip), part))


# -- statements that write records ----------------------------------------------------------------


def encode_step(record: StepRecord, known_masks: Collection[str]) -> list[Statement]:
    """Return the statements of a step, without masks whose fingerprint is in `known_masks`."""
    key = (record.generation, record.branch, record.step)
    out: list[Statement] = []
    positions = [token.pos for token in record.tokens]
    row = [*_step_values(record), min(positions, default=None), max(positions, default=None)]
    row += _LOGITS_ROWS.encode(record.logits) if record.logits else (None,) * _N_LOGITS_COLUMNS
    _add_insert(out, schema.STEPS, row, 1)
    _add_rows(out, TOKEN_ROWS, key[:2], record.tokens)
    if record.logits is not None:
        _add_rows(out, CANDIDATE_ROWS, key, record.logits.candidates)
    if record.inputs is not None:
        _add_rows(out, INPUTS_ROWS, key, (record.inputs,))
    _add_rows(out, CALL_ROWS, key, record.calls)
    _add_rows(out, BUILD_ROWS, key, record.builds)
    _add_rows(out, LAYER_STAT_ROWS, key, record.layer_stats)
    if record.memory is not None:
        _add_rows(out, MEMORY_ROWS, key, (record.memory,))
    if record.training is not None:
        _add_rows(out, TRAINING_ROWS, key, (record.training,))
        _add_rows(out, _PARAMETER_ROWS, key, record.training.gradients)
    if record.masks or record.arrays:
        _add_masks_and_arrays(out, key, record, known_masks)
    out += encode_findings(record.findings, key)
    out += encode_repeats(record.repeats, key)
    out += encode_events(record.events, key)
    return out


def _add_masks_and_arrays(
    out: list[Statement], key: RowKey, record: StepRecord, known_masks: Collection[str]
) -> None:
    from flexinspect.trace.arrays import encode_array

    masks = {m.fingerprint: m for m in record.masks if m.fingerprint not in known_masks}
    flat: list[Any] = []
    owned = (
        (f"mask.{name}", None, mask.fingerprint, getattr(mask, name), None)
        for mask in masks.values()
        for name in MASK_ARRAYS
    )
    of_step = ((each.stream, each.layer, None, each.array, each.dtype) for each in record.arrays)
    number = 0
    for stream, layer, owner, array, dtype in chain(owned, of_step):
        if array is not None:
            _add_array(flat, (*key, number), (stream, layer, owner), encode_array(array, dtype))
            number += 1
    _add_rows(out, MASK_ROWS, key, [*masks.values()])
    _add_arrays(out, flat)


def _add_array(
    flat: list[Any], key: Sequence[int], about: Sequence[Any], stored: EncodedArray
) -> None:
    form = (stored.dtype, stored.item, stored.shape, stored.codec)
    for number, data in enumerate(stored.chunks):
        flat += (*key, number, *about, *form, zlib.crc32(data), data)


def _add_arrays(out: list[Statement], flat: list[Any]) -> None:
    n_rows = len(flat) // len(schema.ARRAYS.columns)
    _add_insert(out, schema.ARRAYS, flat, n_rows, batch=_MAX_ARRAYS_PER_INSERT)


def encode_gradients(record: GradientRecord) -> list[Statement]:
    """Return the statements of a token's gradients; its step may have been written long ago."""
    from flexinspect.trace.arrays import encode_array

    key = (record.generation, record.branch, record.step)
    out: list[Statement] = []
    _add_rows(out, GRADIENT_ROWS, (), (record,))
    _add_rows(out, GRADIENT_STAT_ROWS, key, record.stats)
    flat: list[Any] = []
    for number, name in enumerate(("tokens", "layers"), schema.FIRST_GRADIENT_ARRAY):
        array = getattr(record, name)
        if array is not None:
            about = (f"grads.{name}", None, None)
            _add_array(flat, (*key, number), about, encode_array(array))
    _add_arrays(out, flat)
    return out


def encode_generation_start(record: GenerationRecord) -> list[Statement]:
    """Return the statements of a new generation with its first branch."""
    place = (record.generation, 0)
    out: list[Statement] = []
    _add_rows(out, GENERATION_ROWS, (), (record,))
    out += encode_branch_start(*place, None, None, record.started_at, segments=record.segments)
    _add_rows(out, TOKEN_ROWS, place, record.tokens)
    return out


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
    out: list[Statement] = []
    _add_rows(out, BRANCH_ROWS, (), (row,))
    _add_rows(out, SEGMENT_ROWS, (generation, branch), segments)
    return out


def encode_generation_end(record: GenerationEnd) -> list[Statement]:
    """Return the statements that end a branch of a generation and replace its segments."""
    which = (record.generation, record.branch)
    ended_at = record.ended_at if record.ended_at == record.ended_at else _NAN_TEXT
    how = (record.state, record.answer, record.stop_reason, ended_at)
    out: list[Statement] = [(schema.END_BRANCH, [*how, *which])]
    if record.segments:
        out.append((schema.DROP_SEGMENTS, which))
        _add_rows(out, SEGMENT_ROWS, which, record.segments)
    return out


def encode_trace_end(state: str, facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that end a trace: branches still open end in `state`."""
    out: list[Statement] = [(schema.END_OPEN_BRANCHES, [state, time.time()])]
    return out + encode_run_facts({**facts, "state": state})


def encode_run_facts(facts: Mapping[str, Any]) -> list[Statement]:
    """Return the statements that set facts of the manifest."""
    return [(schema.SET_FACT, (str(key), to_json(value))) for key, value in facts.items()]


def encode_findings(records: Iterable[Finding], key: RowKey | None = None) -> list[Statement]:
    """Return the statements of findings. Those of a step (`key`) take their place from it."""
    out: list[Statement] = []
    for record in records:
        place = (record.generation, record.branch, record.step)
        if key is not None:
            place = (*key[:2], key[2] if record.step is None else record.step)
        _add_rows(out, _FINDING_ROWS, place, (record,))
    return out


def encode_repeats(records: Iterable[Repeat], key: RowKey) -> list[Statement]:
    """Return the statements that count findings of earlier steps again in this step."""
    generation, branch, step = key
    out: list[Statement] = []
    for record in records:
        news = (record.sentence or None, to_json(record.evidence) if record.evidence else None)
        within = generation if record.generation is None else record.generation
        row = [step, *news, within, branch, record.id, record.series]
        out.append((schema.REPEAT_FINDING, row))
    return out


def encode_review(rule: str, generation: int, at: float, wall_ms: float) -> Statement:
    """Return the statement that records that a rule has reviewed a generation."""
    row = [rule, generation, at, wall_ms]
    return insert_sql(schema.REVIEWS, 1), row


def encode_events(records: Iterable[EventRecord], key: RowKey | None = None) -> list[Statement]:
    """Return the statements of events. Those of a step (`key`) take missing places from it."""
    out: list[Statement] = []
    for record in records:
        generation, branch, step = record.generation, None, record.step
        if key is not None:
            generation = key[0] if generation is None else generation
            branch, step = key[1], key[2] if step is None else step
        _add_rows(out, _EVENT_ROWS, (generation, branch, step), (record,))
    return out


def encode_output(records: Iterable[OutputRecord]) -> list[Statement]:
    """Return the statements of what the program printed."""
    out: list[Statement] = []
    _add_rows(out, OUTPUT_ROWS, (), [*records])
    return out


# -- records from cleaned rows --------------------------------------------------------------------


def decode_generation(values: SqlRow) -> GenerationRow:
    """Return a generation from all its cleaned columns, then all of its first branch."""
    n_columns = len(schema.GENERATIONS.columns)
    branch = BRANCH_ROWS.decode(values[n_columns:])
    return GENERATION_ROWS.decode(
        values[:n_columns],
        state=branch.state,
        answer=branch.answer,
        stop_reason=branch.stop_reason,
        ended_at=branch.ended_at,
    )


def decode_step(values: SqlRow) -> StepRow:
    """Return a step from its cleaned columns, at least those up to `n_inf`."""
    row = list(values[:_HISTOGRAM_COLUMNS])
    if not has_logits(values):
        row[_FIRST_LOGITS_COLUMN:] = [None] * (_HISTOGRAM_COLUMNS - _FIRST_LOGITS_COLUMN)
    return _STEP_ROWS.decode(row)


def has_logits(values: SqlRow) -> bool:
    """Tell from the cleaned columns of a step whether its logits were captured."""
    return values[_CHOSEN_COLUMN] is not None


def decode_logits(values: SqlRow, candidates: tuple[Candidate, ...]) -> LogitsRecord:
    """Return the distribution of a step from all its cleaned columns."""
    row = values[_FIRST_LOGITS_COLUMN:]
    if None in row:
        raise DamagedValueError("a row of steps has only a part of its logits")
    return _LOGITS_ROWS.decode(row, candidates=candidates)


def decode_finding(values: SqlRow) -> FindingRow:
    """Return a finding from all its cleaned columns."""
    number, generation, branch, step, *rest = values
    place = {"generation": generation, "branch": branch, "step": step}
    return FindingRow(number, _FINDING_ROWS.decode(rest, **place))


def decode_event(values: SqlRow) -> EventRow:
    """Return an event from all its cleaned columns."""
    number, generation, branch, step, *rest = values
    return EventRow(number, branch, _EVENT_ROWS.decode(rest, generation=generation, step=step))


def decode_output(values: SqlRow) -> OutputRow:
    """Return a piece of output from all its cleaned columns."""
    return OutputRow(values[0], OUTPUT_ROWS.decode(values[1:]))


def decode_array_info(values: SqlRow) -> ArrayInfo:
    """Return an array's facts from a row of `schema.LIST_ARRAYS`."""
    kinds = ("int", "text", "int?", "text", "ints", "text", "int")
    return ArrayInfo(*decode_values(kinds, values, "arrays"))


def decode_chunk(values: SqlRow) -> ArrayChunk:
    """Return a chunk from dtype, item, shape (still text), codec, checksum and data."""
    from flexinspect.trace.arrays import ArrayChunk

    if [type(value) for value in values] != [str, str, str, str, int, bytes]:
        raise DamagedValueError("a row of arrays holds a value of a wrong type")
    return ArrayChunk(*values)


def decode_parameter_gradient(row: SqlRow) -> ParameterGradient:
    """Return a parameter's gradient from the columns `name` to `n_inf` as they are stored."""
    name, norm, largest, n_nan, n_inf = decode_row(schema.GRADS, row, skip=3)
    is_missing = largest != largest and not n_nan
    return ParameterGradient(
        name, norm, None if is_missing else largest, n_nan, n_inf, group_of(name)
    )
