"""Values on their way into and out of SQLite: JSON that survives NaN, and what cannot be bound.

Everything here runs beside a model, so rows are built as flat lists of parameters, one statement
per table.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

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
from flexinspect.trace.arrays import ArrayChunk
from flexinspect.trace.rows import (
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
    from flexinspect.trace.arrays import EncodedArray

_FLOAT = "$float"
_DEPTH = 40


def to_json(value: Any) -> str:
    """Return strict JSON of `value`; never raises, because a recording must go on.

    Non-finite floats become `{"$float": "NaN"}` (or "Infinity", "-Infinity"), tuples, sets and
    numpy arrays become lists, numpy scalars numbers, anything else its `str`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_default)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(simplify(value, _tagged_float), ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_utf8(text) else _to_ascii(text)


def from_json(text: str) -> Any:
    """Return what `to_json` was given, tuples as lists. Raises `ValueError` for damaged JSON."""
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
    """Tell without loading numpy: a value of it is there only when it is loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.generic) or (not scalar and isinstance(value, numpy.ndarray))


def bindable(params: Iterable[Any]) -> list[Any]:
    """Return parameters that SQLite takes, in place of some that it refused.

    numpy scalars become numbers, integers beyond 64 bits and anything unknown text, and lone
    surrogates, which UTF-8 cannot hold, backslash escapes.
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


SqlRow = Sequence[Any]
E = TypeVar("E", bound=Enum)

_FIRST_LOGITS_COLUMN = schema.STEPS.names.index("entropy")
_CHOSEN_COLUMN = schema.STEPS.names.index("chosen_id")
_HISTOGRAM_COLUMNS = schema.STEPS.names.index("histogram_min")


class DamagedValueError(Exception):
    """A stored value that cannot be what was recorded; the reader makes a `TraceError` of it."""


def decode_row(table: Table, row: SqlRow, *, skip: int = 0) -> list[Any]:
    """Return the values of a row, NaN and JSON restored. Raises `Damage` for a wrong type.

    `row` begins with the column number `skip` of the table and may stop before its end.
    """
    return decode_values(table.kinds(skip=skip), row, table.name)


def decode_int(value: Any) -> int:
    """Return a value that must be a whole number. Raises `Damage`."""
    if type(value) is not int:
        raise DamagedValueError(f"a number is expected where {value!a} is")
    return value


def decode_values(kinds: Sequence[str], row: SqlRow, name: str) -> list[Any]:
    """Return the values of a row of these kinds (or of the first ones). Raises `Damage`."""
    try:
        return [_READERS_BY_KIND[kind](value) for kind, value in zip(kinds, row, strict=False)]
    except (ValueError, TypeError) as error:
        raise DamagedValueError(f"a row of {name} holds what it cannot hold ({error})") from None


def decode_column(kind: str, values: SqlRow, name: str) -> list[Any]:
    """Return the values of a column of the table `name`, NaN restored, JSON as the text it is.

    Raises `Damage` for a wrong type.
    """
    read = _READERS_BY_KIND[kind.replace("json", "text")]
    try:
        return [read(value) for value in values]
    except (ValueError, TypeError) as error:
        raise DamagedValueError(f"a row of {name} holds what it cannot hold ({error})") from None


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


def decode_token(values: SqlRow) -> TokenRecord:
    """Return a token from the cleaned columns after generation and branch."""
    return TokenRecord(*values)


def decode_segment(values: SqlRow) -> Segment:
    """Return a segment from the cleaned columns after its number."""
    start, stop, label, kind, owner = values
    return Segment(start, stop, label, _check_enum(SegmentKind, kind), owner)


def decode_generation(values: SqlRow) -> GenerationRow:
    """Return a generation from the cleaned columns of it, then all of its first branch."""
    number, sample_id, mask_name, positions, expected, declared, started_at, model = values[:8]
    first = decode_branch(values[8:])
    return GenerationRow(
        *(number, sample_id, mask_name, positions),
        expected=tuple(_check_list(expected, str)),
        declared=_check_dict(declared),
        started_at=started_at,
        model=model,
        state=first.state,
        answer=first.answer,
        stop_reason=first.stop_reason,
        ended_at=first.ended_at,
    )


def decode_branch(values: SqlRow) -> BranchRow:
    """Return a branch from all its cleaned columns."""
    return BranchRow(*(*values[:-1], _check_dict(values[-1])))


def decode_step(values: SqlRow) -> StepRow:
    """Return a step from its cleaned columns."""
    head, logits = values[:_FIRST_LOGITS_COLUMN], values[_FIRST_LOGITS_COLUMN:_HISTOGRAM_COLUMNS]
    return StepRow(*head, *(logits if has_logits(values) else (None,) * len(logits)))


def has_logits(values: SqlRow) -> bool:
    """Tell from the cleaned columns of a step whether its logits were captured."""
    return values[_CHOSEN_COLUMN] is not None


def decode_logits(values: SqlRow, candidates: tuple[Candidate, ...]) -> LogitsRecord:
    """Return the distribution of a step from its cleaned columns."""
    *scalars, histogram = values[_FIRST_LOGITS_COLUMN:]
    if histogram is None or any(value is None for value in scalars):
        raise DamagedValueError("a row of steps has only a part of its logits")
    return LogitsRecord(*[*scalars, tuple(_check_list(histogram, int)), candidates])


def decode_candidate(values: SqlRow) -> Candidate:
    """Return a candidate from the cleaned columns after the step."""
    return Candidate(*values)


def decode_inputs(values: SqlRow) -> InputsRecord:
    """Return what a step was fed from the cleaned columns after the step."""
    batch, positions, before, after = values
    runs = [tuple(_check_list(run, int)) for run in _check_list(positions, list)]
    if any(len(run) != 2 for run in runs):
        raise DamagedValueError("a run of position ids is no pair")
    return InputsRecord(
        batch, tuple(runs), tuple(_check_list(before, int)), tuple(_check_list(after, int))
    )


def decode_call(values: SqlRow) -> CallRecord:
    """Return a call from the cleaned columns after its number."""
    causal = values[-2]
    return CallRecord(*(*values[:-2], None if causal is None else bool(causal), values[-1]))


def decode_build(values: SqlRow) -> BuildRecord:
    """Return a built mask from the cleaned columns after its number."""
    return BuildRecord(*values)


def decode_layer_stat(values: SqlRow) -> LayerStatRecord:
    """Return statistics from the cleaned columns after their number."""
    return LayerStatRecord(*values)


def decode_memory(values: SqlRow) -> MemoryRecord:
    """Return memory figures from the cleaned columns after the step."""
    return MemoryRecord(*values)


def decode_gradient_stat(values: SqlRow) -> GradientStat:
    """Return a parameter's gradient from the cleaned columns after the step."""
    return GradientStat(*values)


def decode_gradients(
    values: SqlRow, stats: tuple[GradientStat, ...], arrays: dict[str, Array]
) -> GradientRecord:
    """Return a token's gradients from all its cleaned columns, its parameters and its arrays."""
    generation_number, branch_number, step_number, *facts = values
    row = [generation_number, step_number, *facts[:-3], branch_number, *facts[-3:]]
    wide = (arrays.get("grads.tokens"), arrays.get("grads.layers"))
    return GradientRecord(*[*row, stats, *wide])


def decode_mask(values: SqlRow) -> MaskRecord:
    """Return a mask without its arrays from the cleaned columns after the step."""
    return MaskRecord(*values)


def decode_finding(values: SqlRow) -> FindingRow:
    """Return a finding from all its cleaned columns."""
    row_id, generation_number, branch_number, step_number = values[:4]
    name, severity, sentence, layer, head, positions, evidence = values[4:11]
    layers, series, last_step, times, *words = values[11:]
    record = Finding(
        *(name, _check_enum(Severity, severity), sentence),
        *(generation_number, branch_number, step_number, layer, head),
        positions=tuple(_check_list(positions, int)),
        evidence=_check_dict(evidence),
        layers=tuple(_check_list(layers, int)),
        series=series,
        last_step=last_step,
        times=times,
        **dict(zip(("why", "confirm", "fix", "query"), words, strict=True)),
    )
    return FindingRow(row_id, record)


def decode_event(values: SqlRow) -> EventRow:
    """Return an event from all its cleaned columns."""
    number, generation_number, branch_number, step_number, kind, text, at, data = values
    record = EventRecord(kind, text, at, generation_number, step_number, _check_dict(data))
    return EventRow(number, branch_number, record)


def decode_output(values: SqlRow) -> OutputRow:
    """Return a piece of output from all its cleaned columns."""
    number, generation_number, step_number, stream, at, text = values
    return OutputRow(number, OutputRecord(stream, text, at, generation_number, step_number))


def decode_array_info(values: SqlRow) -> ArrayInfo:
    """Return an array's facts from a row of `schema.LIST_ARRAYS`."""
    kinds = ("int", "text", "int?", "text", "json", "text", "int")
    number, stream, layer, dtype, shape, codec, n_bytes = decode_values(kinds, values, "arrays")
    return ArrayInfo(number, stream, layer, dtype, tuple(_check_list(shape, int)), codec, n_bytes)


def decode_chunk(values: SqlRow) -> ArrayChunk:
    """Return a chunk from dtype, item, shape (still text), codec, checksum and data."""
    if [type(value) for value in values] != [str, str, str, str, int, bytes]:
        raise DamagedValueError("a row of arrays holds what it cannot hold")
    return ArrayChunk(*values)


def _check_enum(kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise DamagedValueError(f"{value!r} is no {kind.__name__}") from None


def _check_list(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise DamagedValueError(f"a list of {kind.__name__} holds something else")
    return value


def _check_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DamagedValueError("an object holds something else")
    return value


N_GRAD_COLUMNS = 8
"""Columns of `grads` that say something of a training step: up to `n_inf`."""


_GRADIENTS_PER_INSERT = 64


def encode_training_step(key: RowKey, record: TrainingStepRecord) -> list[Statement]:
    """Return the statements of a training step with its gradients."""
    out: list[Statement] = [
        (insert_sql(schema.TRAINING_STEPS, 1), [*key, *_training_values(record)])
    ]
    nothing = (None,) * (len(schema.GRADS.columns) - N_GRAD_COLUMNS)
    for start in range(0, len(record.gradients), _GRADIENTS_PER_INSERT):
        part = record.gradients[start : start + _GRADIENTS_PER_INSERT]
        flat: list[Any] = []
        for facts in part:
            flat += (*key, facts.name, facts.norm, facts.max, facts.n_nan, facts.n_inf, *nothing)
        out.append((insert_sql(schema.GRADS, len(part)), flat))
    return out


def _training_values(record: TrainingStepRecord) -> tuple[Any, ...]:
    producer = None if record.producer is None else to_json(asdict(record.producer))
    return (
        *(record.loss, record.loss_source, _floats_to_json(record.learning_rates)),
        *map(_nan_as_text, (record.total_norm, record.norm_before_clip, record.max_norm)),
        *(record.n_parameters, record.n_exploding, record.n_vanishing),
        *(record.n_dead, record.n_sick),
        *(
            _floats_to_json(record.group_norms),
            _floats_to_json(record.group_ratios),
            producer,
            record.n_backward,
        ),
        *(record.forward_ms, record.backward_ms, record.optimizer_ms),
        *(_nan_as_text(record.data_ms), record.other_ms, _nan_as_text(record.scale)),
        *(int(record.is_skipped), record.device, record.autocast, record.detail),
    )


def _floats_to_json(values: Sequence[float]) -> str:
    if all(map(math.isfinite, values)):
        return str([*values])  # JSON already, at a third of the price
    return to_json([*values])


def decode_training_step(
    values: Sequence[Any], gradients: Sequence[ParameterGradient] = ()
) -> TrainingStepRecord:
    """Return a training step from the cleaned columns after its key. Raises `ValueError`."""
    fields: dict[str, Any] = dict(zip(schema.TRAINING_STEPS.names[3:], values, strict=True))
    for name in ("learning_rates", "group_norms", "group_ratios"):
        fields[name] = _decode_floats(fields[name])
    if fields["producer"] is not None:
        fields["producer"] = _decode_origin(fields["producer"])
    return TrainingStepRecord(**fields, gradients=tuple(gradients))


def decode_parameter_gradient(values: Sequence[Any]) -> ParameterGradient:
    """Return a parameter's gradient from the cleaned columns `name` to `n_inf`."""
    name, norm, largest, n_nan, n_inf = values
    is_missing = largest != largest and not n_nan
    return ParameterGradient(
        name, norm, None if is_missing else largest, n_nan, n_inf, group_of(name)
    )


def _decode_floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(one) not in (int, float) for one in values):
        raise ValueError("a list of numbers holds something else")
    return tuple(map(float, values))


def _decode_origin(said: Any) -> AnomalyOrigin:
    try:
        return AnomalyOrigin(**said)
    except TypeError as error:
        raise ValueError(f"no producer ({error})") from None
