"""What the layers panel knows: one statistic of every layer and step, and the first bad output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.parts.windows import StepWindow, load_step_window
from flexinspect.panels.source import Source
from flexinspect.records import LayerStatRecord
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import format_ranges, lineage
from flexinspect.trace.ranges import (
    NonfiniteOutput,
    StatCell,
    Statistic,
    branch_of_step,
    first_nonfinite_output,
    layer_stats_range,
    step_range,
)
from flexinspect.trace.reader import TraceReader
from flexinspect.widgets.plots import format_number

MEASURES: dict[Statistic, str] = {
    "norm": "norm per row",
    "max": "max abs",
    "mean": "mean",
    "std": "std",
    "bad": "NaN/Inf",
}
"""Measures and how they are called. The norm is over all rows of a step, so it is divided by the
root of their number: a prefill would outshine every decode step."""

SCAN_STEPS = 2048
"""Steps that are searched for NaN and Inf at once, and whose answer is kept."""

MAX_CELLS = 1 << 14
"""Values that a window holds at most; it has fewer steps where a step has very many modules."""


@dataclass(frozen=True, slots=True)
class FirstBadOutput:
    """The first bad output of a branch: where, how much, and what of that step is bad too.

    `n_values` is None where the number of values is not known; `later` are the other layers.
    """

    step: int
    stat: LayerStatRecord
    n_values: int | None
    later: tuple[int, ...]

    def format_place(self) -> str:
        """Return "step 3, layer 5"."""
        return f"step {self.step}, layer {self.stat.layer}"

    def format_counts(self) -> str:
        """Return "12 NaN and 1 Inf of 192 values"."""
        of = "" if self.n_values is None else f" of {self.n_values} values"
        return f"{self.stat.n_nan} NaN and {self.stat.n_inf} Inf{of}"

    def sentence(self) -> str:
        """Return the whole of it in one sentence."""
        module = escape_unprintable(self.stat.module)
        also = f"; in that step also layers {format_ranges(self.later)}" if self.later else ""
        also = also.replace("layers", "layer") if len(self.later) == 1 else also
        return f"First NaN/Inf at {self.format_place()} ({module}): {self.format_counts()}{also}."


@dataclass(frozen=True, slots=True)
class LayersData:
    """One measure in a window of steps: arrays of shape (layers, steps), see `layers`, `window`.

    `values` is NaN where nothing is known, `n_bad` -1. `kind` is the module within the layer, ""
    the layer itself; `kinds` are those of the window. `now` are all modules of the current step.
    """

    place: TracePlace
    window: StepWindow
    measure: Statistic
    kind: str
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    values: npt.NDArray[np.float64]
    n_bad: npt.NDArray[np.int64]
    step_stats: tuple[LayerStatRecord, ...]
    rows: int
    first_bad: FirstBadOutput | None

    def scale(self) -> tuple[float, float, bool]:
        """Return the lowest and highest finite value, and whether the colours are logarithmic."""
        if self.measure == "bad":
            return 0.0, 1.0, False
        fine = self.values[np.isfinite(self.values)]
        if not fine.size:
            return 0.0, 0.0, False
        low, high = float(fine.min()), float(fine.max())
        return low, high, low > 0 and high > 30 * low

    def current_stat(self) -> LayerStatRecord | None:
        """Return the shown module of the place's layer at the current step."""
        mine = (stat for stat in self.step_stats if stat.layer == self.place.layer)
        return next(
            (stat for stat in mine if module_kind(stat.layer, stat.module) == self.kind), None
        )


def module_kind(layer: int, module: str) -> str:
    """Return a module's name within its layer: "" for "model.layers.3", "mlp" for "...3.mlp"."""
    parts = module.split(".")
    if str(layer) not in parts:
        return module
    return ".".join(parts[parts.index(str(layer)) + 1 :])


def format_kind(kind: str) -> str:
    """Return the name of a kind of module for people."""
    return escape_unprintable(kind) or "layer"


def load_layers(
    source: Source, place: TracePlace, n_columns: int, measure: Statistic, chosen: str
) -> LayersData:
    """Read the window that fits in `n_columns`: the step, one statistic of its neighbours.

    Raises `Missing` when there are no statistics in the window and nothing bad anywhere.
    """
    reader = source.reader
    owner = branch_of_step(reader, place.generation, place.step, place.branch)
    now = tuple(reader.layer_stats(place.generation, place.step, owner))
    most = max(MAX_CELLS // max(len(now), 1), 8)
    window = load_step_window(reader, place, min(n_columns, most))
    span = (place.generation, window.start, window.stop, place.branch)
    cells = layer_stats_range(reader, *span, statistic=measure)
    bad = find_first_bad(source, place, window)
    if not cells and bad is None:
        raise Missing(
            f"No layer statistics are recorded in {window.format_steps()}, and no NaN or Inf.",
            "Level basic records only layers with NaN or Inf; record with --level advanced.",
        )
    lengths = {row.step: row.q_len for row in step_range(reader, *span)}
    kinds = tuple(dict.fromkeys(module_kind(cell.layer, cell.module) for cell in cells))
    kind = chosen if chosen in kinds else "" if "" in kinds or not kinds else kinds[0]
    mine = [cell for cell in cells if module_kind(cell.layer, cell.module) == kind]
    layers = tuple(sorted({cell.layer for cell in mine}))
    values, n_bad = stat_arrays(mine, window, layers)
    if measure == "norm":
        values /= np.sqrt([max(lengths.get(step, 1), 1) for step in window.steps])
    rows = max(lengths.get(place.step, 1), 1)
    return LayersData(place, window, measure, kind, kinds, layers, values, n_bad, now, rows, bad)


def stat_arrays(
    cells: Sequence[StatCell], window: StepWindow, layers: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return values and counts of NaN and Inf, each (layers, steps).

    Where a module ran several times in a step, the larger value counts.
    """
    values = np.full((len(layers), len(window)), np.nan)
    n_bad = np.full(values.shape, -1, np.int64)
    row = {layer: index for index, layer in enumerate(layers)}
    for cell in cells:
        at = row[cell.layer], cell.step - window.start
        values[at] = np.fmax(values[at], cell.value)
        n_bad[at] = max(n_bad[at], cell.n_bad)
    return values, n_bad


def find_first_bad(source: Source, place: TracePlace, window: StepWindow) -> FirstBadOutput | None:
    """Return the first bad output of the place's branch, parents included.

    Searched `SCAN` steps at a time; what is known of a finished part is kept.
    """
    reader, generation = source.reader, place.generation
    for branch, first, stop in reversed(lineage(reader, generation, place.branch)):
        end = window.last + 1 if stop is None else min(stop, window.last + 1)
        for start in range(first, end, SCAN_STEPS):
            part = (generation, start, min(start + SCAN_STEPS, end), branch)
            found = _search_steps(source, part, done=start + SCAN_STEPS <= window.last)
            if found is not None:
                return _with_details(reader, generation, branch, found)
    return None


def _search_steps(
    source: Source, part: tuple[int, int, int, int], *, done: bool
) -> NonfiniteOutput | None:
    def search() -> NonfiniteOutput | None:
        return first_nonfinite_output(source.reader, *part)

    return (
        source.get_or_create(("first bad output", part), search, lambda _: 400)
        if done
        else search()
    )


def _with_details(
    reader: TraceReader, generation: int, branch: int, found: NonfiniteOutput
) -> FirstBadOutput:
    stats = reader.layer_stats(generation, found.step, branch)
    bad_layers = {stat.layer for stat in stats if stat.n_nan or stat.n_inf}
    later = tuple(sorted(bad_layers - {found.stat.layer}))
    return FirstBadOutput(
        found.step, found.stat, _count_values(reader, generation, branch, found), later
    )


def _count_values(
    reader: TraceReader, generation: int, branch: int, found: NonfiniteOutput
) -> int | None:
    """Return how many values a layer's output has: rows times width, both as recorded."""
    if module_kind(found.stat.layer, found.stat.module):
        return None
    step = reader.step(generation, found.step, branch)
    hidden = reader.model(generation).get("hidden")
    if step is None or not isinstance(hidden, int):
        return None
    total = step.q_len * hidden
    return total if total >= found.stat.n_nan + found.stat.n_inf else None


def describe_layers(data: LayersData) -> list[str]:
    """Return what is bad, the current step as a table, and the range of the measure."""
    span = f"steps {data.window.first}-{data.window.last}"
    fine = f"No recorded layer output has NaN or Inf in {span}."
    lines = [data.first_bad.sentence() if data.first_bad else fine]
    lines += stat_table(data)
    lines.append(_describe_range(data))
    if len(data.kinds) > 1:
        names = ", ".join(format_kind(kind) for kind in data.kinds)
        lines.append(f"Modules recorded per layer: {names}; shown: {format_kind(data.kind)}.")
    return lines


def stat_table(data: LayersData) -> list[str]:
    """Return all modules of the current step as a table between empty lines."""
    if not data.step_stats:
        none = f"No layer statistics are recorded at step {data.window.current}"
        return [f"{none}; level basic records only layers with NaN or Inf."]
    names = ("norm", "norm/row", "min", "max", "mean", "std")
    head = f"{'layer':>5}{''.join(f'{name:>10}' for name in names)}{'NaN':>8}{'Inf':>8}  module"
    rows = []
    for stat in data.step_stats:
        per_row = stat.norm / data.rows**0.5
        values = (stat.norm, per_row, stat.min, stat.max, stat.mean, stat.std)
        figures = "".join(f" {format_number(value, 9)}" for value in values)
        rows.append(
            f"{stat.layer:>5}{figures}{stat.n_nan:>8}{stat.n_inf:>8}  {escape_unprintable(stat.module)}"
        )
    rows_word = f"{data.rows} rows" if data.rows > 1 else "1 row"
    return ["", f"Step {data.window.current} ({rows_word}):", head, *rows, ""]


def _describe_range(data: LayersData) -> str:
    name = MEASURES[data.measure]
    what = name[0].upper() + name[1:]
    shown = data.window.format_steps()
    if data.measure == "bad":
        n_sick, n_known = int((data.n_bad > 0).sum()), int((data.n_bad >= 0).sum())
        return f"{what} in {shown}: {n_sick} of {n_known} layer outputs have some."
    fine = np.where(np.isfinite(data.values), data.values, np.nan)
    if np.isnan(fine).all():
        return f"{what} in {shown}: no finite value."
    ends = [np.unravel_index(find(fine), fine.shape) for find in (np.nanargmin, np.nanargmax)]
    words = [
        f"{format_number(float(fine[at]))} (step {data.window.start + int(at[1])}, layer "
        f"{data.layers[int(at[0])]})"
        for at in ends
    ]
    return f"{what} in {shown}: {words[0]} to {words[1]}."
