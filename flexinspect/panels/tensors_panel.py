"""The tensors panel: any array that a step stored, with statistics and a slice of its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.panels.base import CURSOR_MOVES, Help, Missing, Navigate, Panel, Picture, Request
from flexinspect.panels.panel_source import Source
from flexinspect.trace.queries import branch_of_step
from flexinspect.trace.query_results import ArrayInfo

_CELL_WIDTH = 10
_DESCRIBED_ROWS, _DESCRIBED_COLUMNS = 6, 8
_HINT = "Record with --level extreme and --layers; basic stores almost no arrays."


class TensorOptions(Struct, frozen=True):
    """Which array, and which part of it.

    `stream` is the name of an array ("" is the first one), `index` the indices of its leading axes
    as in "0,3" (default: zeros), `row` and `column` the first of the last two axes that is shown.
    """

    stream: str = ""
    index: str = ""
    row: int = 0
    column: int = 0


class TensorStatistics(Struct, frozen=True):
    """Statistics over the finite values of an array, and the counts of the others.

    `minimum` to `std` are NaN if there is no finite value.
    """

    minimum: float
    maximum: float
    mean: float
    std: float
    n_nan: int
    n_inf: int
    n_zero: int


class TensorData(Struct, frozen=True):
    """The arrays of a step, and the chosen one: `plane` is its slice, 2-d."""

    step: int
    arrays: tuple[ArrayInfo, ...]
    chosen: ArrayInfo
    statistics: TensorStatistics
    plane: np.ndarray[Any, Any]
    index: tuple[int, ...]

    @property
    def streams(self) -> list[str]:
        """The names of all arrays, each once."""
        return list(dict.fromkeys(info.stream for info in self.arrays))


def measure(array: np.ndarray[Any, Any]) -> TensorStatistics:
    """Return the statistics of an array, computed in float64."""
    values = array.astype(np.float64, copy=False).ravel()
    finite = values[np.isfinite(values)]
    n_nan = int(np.isnan(values).sum())
    has_values = len(finite) > 0
    return TensorStatistics(
        minimum=float(finite.min()) if has_values else math.nan,
        maximum=float(finite.max()) if has_values else math.nan,
        mean=float(finite.mean()) if has_values else math.nan,
        std=float(finite.std()) if has_values else math.nan,
        n_nan=n_nan,
        n_inf=len(values) - len(finite) - n_nan,
        n_zero=len(finite) - int(np.count_nonzero(finite)),
    )


class TensorsPanel(Panel[TensorData, TensorOptions]):
    """Shows any stored array of a step."""

    name = "tensors"
    title = "Tensors"
    help = Help(
        "It shows any array that the step stored: its shape, type, statistics and values.",
        "'m' goes to the next array, 'v' to the next index of its first axis (such as a head); the "
        "cursor keys move the part that is shown. Of arrays of layers it shows the current layer.",
        "Look for NaN and Inf, for values far outside of the others, and for rows that are all 0.",
    )
    actions = ("view.flip", "view.measure", *CURSOR_MOVES)
    initial_options = TensorOptions()

    def load(self, source: Source, request: Request[TensorOptions]) -> TensorData:
        """Read the chosen array of the step. Raises `Missing` if the step stored none."""
        place, options = request.place, request.options
        reader = source.reader
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        arrays = tuple(reader.arrays(place.generation, place.step, branch))
        if not arrays:
            raise Missing(f"Step {place.step} stored no arrays.", _HINT)
        chosen = _choose(arrays, options.stream, place.layer)
        key = (place.generation, place.step, chosen.stream, chosen.layer, branch)
        array = reader.array(*key)
        assert array is not None
        values = np.atleast_2d(np.asarray(array))
        index = _parse_index(options.index, values.shape[:-2])
        statistics = measure(values)
        return TensorData(place.step, arrays, chosen, statistics, values[index], index)

    def describe(self, data: TensorData) -> list[str]:
        """Return the arrays of the step, then statistics and the first values of the chosen one."""
        lines = [f"Step {data.step} stored {plural(len(data.arrays), 'array')}:"]
        lines += [f"  {_array_line(info)}" for info in data.arrays]
        lines += ["", f"{_array_line(data.chosen)}", *_statistics_lines(data)]
        rows = data.plane[:_DESCRIBED_ROWS, :_DESCRIBED_COLUMNS]
        lines += ["  ".join(f"{_number(value):>9}" for value in row) for row in rows]
        more = [n for n, shown in zip(data.plane.shape, rows.shape, strict=True) if n > shown]
        return [*lines, f"… of {data.plane.shape[0]} x {data.plane.shape[1]}"] if more else lines

    def paint(self, data: TensorData, request: Request[TensorOptions], theme: Theme) -> Picture:
        """Draw the statistics, and as many values from the first row and column on as fit."""
        pen, options = Pen(theme, request.width), request.options
        strips = [pen.line((_array_line(data.chosen), "chosen"))]
        strips += [pen.line((line, "text")) for line in _statistics_lines(data)]
        row, column = _clamped(options, data)
        n_columns = max((request.width - 8) // _CELL_WIDTH, 1)
        shown = range(column, min(column + n_columns, data.plane.shape[1]))
        heads = "".join(f"{number:>{_CELL_WIDTH}}" for number in shown)
        strips.append(pen.line((f"{'row':<7}{heads}", "muted")))
        room = max(request.height - len(strips), 0)
        for number in range(row, min(row + room, data.plane.shape[0])):
            spans = [(f"{number:<7}", "muted")]
            spans += [_value_span(data.plane[number, one]) for one in shown]
            strips.append(pen.line(*spans))
        where = f"rows {row}-{min(row + room, data.plane.shape[0]) - 1} of {data.plane.shape[0]}"
        is_bad = data.statistics.n_nan + data.statistics.n_inf > 0
        return Picture(strips[: request.height], f"{data.chosen.stream} · {where}", alarm=is_bad)

    def on_action(
        self, action: str, data: TensorData, request: Request[TensorOptions]
    ) -> TensorOptions | Navigate | None:
        """Choose the next array or index, or move the part that is shown."""
        options = request.options
        if action == "view.flip":
            streams = data.streams
            if len(streams) < 2:
                return None
            after = streams[(streams.index(data.chosen.stream) + 1) % len(streams)]
            return TensorOptions(stream=after)
        if action == "view.measure":
            if not data.index or data.chosen.shape[0] < 2:
                return None
            first = (data.index[0] + 1) % data.chosen.shape[0]
            return replace(options, index=",".join(map(str, (first, *data.index[1:]))))
        if action in CURSOR_MOVES:
            down, across = CURSOR_MOVES[action]
            row, column = _clamped(options, data)
            moved = replace(options, row=row + down, column=column + across)
            row, column = _clamped(moved, data)
            return replace(options, row=row, column=column)
        return None


def _choose(arrays: Sequence[ArrayInfo], stream: str, layer: int) -> ArrayInfo:
    """Return the array of a name, of the layer if there is one. Raises `Missing`."""
    named = [info for info in arrays if info.stream == (stream or arrays[0].stream)]
    if not named:
        known = ", ".join(dict.fromkeys(info.stream for info in arrays))
        raise Missing(f"This step stored no array {stream!r}.", f"It has {known}.")
    return next((info for info in named if info.layer == layer), named[0])


def _parse_index(text: str, leading: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the leading axes. Raises `UsageError` for others."""
    parts = [part.strip() for part in text.split(",")] if text else ["0"] * len(leading)
    numbers = [int(part) if part.isdecimal() else -1 for part in parts]
    is_valid = len(numbers) == len(leading) and all(
        0 <= number < size for number, size in zip(numbers, leading, strict=True)
    )
    if not is_valid:
        sizes = " x ".join(map(str, leading)) or "none"
        hint = f"Give one number for each of its leading axes ({sizes}), such as 0,1."
        raise UsageError(f"The index {text!r} does not fit the array.", hint=hint)
    return tuple(numbers)


def _clamped(options: TensorOptions, data: TensorData) -> tuple[int, int]:
    """Return the first shown row and column, inside of the array."""
    row, column = (
        min(max(start, 0), size - 1) if size else 0
        for start, size in zip((options.row, options.column), data.plane.shape, strict=True)
    )
    return row, column


def _array_line(info: ArrayInfo) -> str:
    layer = "" if info.layer is None else f", layer {info.layer}"
    shape = " x ".join(map(str, info.shape)) or "a single value"
    name = escape_unprintable(info.stream)
    return f"{name}{layer}: {info.dtype} {shape}, {human_bytes(info.n_bytes)} in the file"


def _statistics_lines(data: TensorData) -> list[str]:
    found = data.statistics
    values = f"min {_number(found.minimum)}  max {_number(found.maximum)}"
    lines = [
        f"{values}  mean {_number(found.mean)}  std {_number(found.std)}",
        f"NaN {found.n_nan}  Inf {found.n_inf}  zero {found.n_zero}",
    ]
    if data.index:
        listed = ", ".join(map(str, data.index))
        lines.append(f"slice [{listed}, :, :] of {plural(data.chosen.shape[0], 'plane')}")
    return lines


def _number(value: float) -> str:
    number = float(value)
    if number.is_integer() and abs(number) < 1e6:
        return str(int(number))
    return f"{number:.4g}"


def _value_span(value: float) -> tuple[str, str]:
    style = "text" if math.isfinite(float(value)) else "bad"
    return f"{_number(value):>{_CELL_WIDTH}}", style
