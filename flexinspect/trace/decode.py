"""Rows into records, with every value checked: a damaged file must not pass for a strange one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from flexinspect.findings import Finding, Severity
from flexinspect.gradientrecords import GradientRecord, GradientStat
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import (
    Array,
    BuildRecord,
    CallRecord,
    Candidate,
    EventRecord,
    InputsRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    OutputRecord,
    TokenRecord,
)
from flexinspect.trace.arrays import ArrayChunk
from flexinspect.trace.columns import Table
from flexinspect.trace.rows import (
    ArrayInfo,
    BranchRow,
    EventRow,
    FindingRow,
    GenerationRow,
    OutputRow,
    StepRow,
)
from flexinspect.trace.values import from_json

SqlRow = Sequence[Any]
E = TypeVar("E", bound=Enum)


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
    """Return a step from its cleaned columns up to `n_inf`."""
    head, scalars = values[:12], values[12:]
    has_logits = scalars[2] is not None
    return StepRow(*head, *(scalars if has_logits else (None,) * len(scalars)))


def decode_logits(values: SqlRow, candidates: tuple[Candidate, ...]) -> LogitsRecord:
    """Return the distribution of a step from the cleaned columns from `entropy` on."""
    if any(value is None for value in values):
        raise DamagedValueError("a row of steps has only a part of its logits")
    *scalars, histogram = values
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
