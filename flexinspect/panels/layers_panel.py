"""The layers panel: statistics of every layer's output at every step, and the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from rich.segment import Segment
from textual.strip import Strip

from flexinspect.core.text import capitalize, escape_unprintable, format_numbers, plural
from flexinspect.drawing import heatmap
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, join_strips
from flexinspect.drawing.theme import Theme
from flexinspect.panels.anomaly_text import describe_producer
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    Panel,
    Picture,
    Request,
    TracePlace,
    import_hint,
    training_facts,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import StepWindow, drop_cut_span, load_step_window
from flexinspect.records.step import LayerStatRecord
from flexinspect.trace import queries
from flexinspect.trace.reader import TraceReader

MEASURES: dict[queries.Statistic, str] = {
    "norm": "norm per row",
    "max": "max abs",
    "mean": "mean",
    "std": "std",
    "bad": "NaN/Inf",
}
"""Measures and their titles. The recorded norm is over all rows of a step, so it is divided by the
square root of their number: otherwise a prefill would dwarf every decode step."""

SCAN_STEPS = 2048
"""Steps that are searched for NaN and Inf in one query, whose result is cached."""

MAX_CELLS = 1 << 14
"""Maximum number of values in a window; it has fewer steps where a step has very many modules."""

_LABEL_WIDTH, _VALUE_WIDTH = 7, 9
_TABLE_WIDTH = 90
_BAD_LEVEL, _MISSING_LEVEL = heatmap.CIVIDIS.size, heatmap.CIVIDIS.size + 1


class FirstBadOutput(Struct, frozen=True):
    """The first module output of a branch with NaN or Inf.

    `n_values` is the size of the output, None if it is unknown; `later` are the other layers with
    NaN or Inf in the same step.
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
        """Return the place, the counts and the other layers in one sentence."""
        module = escape_unprintable(self.stat.module)
        also = f"; in that step also {format_numbers('layer', self.later)}" if self.later else ""
        return f"First NaN/Inf at {self.format_place()} ({module}): {self.format_counts()}{also}."


class LayersData(Struct, frozen=True):
    """One measure in a window of steps: arrays of shape (layers, steps), see `layers`, `window`.

    Where nothing is recorded `values` is NaN and `n_bad`, the number of NaN and Inf, is -1. `kind`
    is the shown module within the layer, "" for the layer itself; `kinds` are all of the window.
    `step_stats` are all modules of the current step, `rows` is its number of rows.
    """

    place: TracePlace
    window: StepWindow
    measure: queries.Statistic
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
        finite = self.values[np.isfinite(self.values)]
        if not finite.size:
            return 0.0, 0.0, False
        low, high = float(finite.min()), float(finite.max())
        return low, high, low > 0 and high > 30 * low


def module_kind(layer: int, module: str) -> str:
    """Return a module's name within its layer: "" for "model.layers.3", "mlp" for "...3.mlp"."""
    parts = module.split(".")
    if str(layer) not in parts:
        return module
    return ".".join(parts[parts.index(str(layer)) + 1 :])


def format_kind(kind: str) -> str:
    """Return the printable name of a kind of module."""
    return escape_unprintable(kind) or "layer"


def stat_arrays(
    cells: Sequence[queries.StatCell], window: StepWindow, layers: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return values (float64) and counts of NaN and Inf (int64), each (layers, steps).

    If a module ran several times in a step, the largest value is taken.
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
    """Return the first output with NaN or Inf of the place's branch, its ancestors included.

    Searches `SCAN_STEPS` steps at a time; the results of finished ranges are cached.
    """
    reader, generation = source.reader, place.generation
    for branch, first, stop in reversed(queries.lineage(reader, generation, place.branch)):
        end = window.last + 1 if stop is None else min(stop, window.last + 1)
        for start in range(first, end, SCAN_STEPS):
            steps = (generation, start, min(start + SCAN_STEPS, end), branch)
            search = partial(queries.first_nonfinite_output, reader, *steps)
            is_done = start + SCAN_STEPS <= window.last
            key = ("first bad output", steps)
            output = source.get_or_create(key, search) if is_done else search()
            if output is not None:
                return _with_details(reader, generation, branch, *output)
    return None


def _with_details(
    reader: TraceReader, generation: int, branch: int, number: int, stat: LayerStatRecord
) -> FirstBadOutput:
    """Add the size of a layer's output, if it is known, and the other layers."""
    key, n_values = (generation, number, branch), None
    step, hidden = reader.step(*key), reader.model(generation).get("hidden")
    if not module_kind(stat.layer, stat.module) and step is not None and isinstance(hidden, int):
        total = step.q_len * hidden
        n_values = total if total >= stat.n_nan + stat.n_inf else None
    bad_layers = {other.layer for other in reader.layer_stats(*key) if other.n_nan or other.n_inf}
    return FirstBadOutput(number, stat, n_values, tuple(sorted(bad_layers - {stat.layer})))


def stat_table(data: LayersData) -> list[str]:
    """Return all modules of the current step as a table between empty lines."""
    if not data.step_stats:
        step = data.window.current
        hint = "lower levels record only layers with NaN or Inf"
        return [f"No layer statistics are recorded at step {step}; {hint}."]
    names = ("norm", "norm/row", "min", "max", "mean", "std")
    lines = [f"{'layer':>5}{''.join(f'{name:>10}' for name in names)}{'NaN':>8}{'Inf':>8}  module"]
    for stat in data.step_stats:
        per_row = stat.norm / data.rows**0.5
        values = (stat.norm, per_row, stat.min, stat.max, stat.mean, stat.std)
        figures = "".join(f" {format_number(value, 9)}" for value in values)
        counts = f"{stat.n_nan:>8}{stat.n_inf:>8}"
        lines.append(f"{stat.layer:>5}{figures}{counts}  {escape_unprintable(stat.module)}")
    return ["", f"Step {data.window.current} ({plural(data.rows, 'row')}):", *lines, ""]


def _describe_range(data: LayersData) -> str:
    title = f"{capitalize(MEASURES[data.measure])} in {data.window.format_steps()}"
    if data.measure == "bad":
        n_bad, n_recorded = int((data.n_bad > 0).sum()), int((data.n_bad >= 0).sum())
        return f"{title}: {n_bad} of {n_recorded} layer outputs have some."
    finite = np.where(np.isfinite(data.values), data.values, np.nan)
    if np.isnan(finite).all():
        return f"{title}: no finite value."
    ends = []
    for index in (int(np.nanargmin(finite)), int(np.nanargmax(finite))):
        row, column = divmod(index, finite.shape[1])
        where = f"step {data.window.start + column}, layer {data.layers[row]}"
        ends.append(f"{format_number(float(finite[row, column]))} ({where})")
    return f"{title}: {' to '.join(ends)}."


_HINTS = {
    "basic": (
        "Level basic records only layers with NaN or Inf, in steps whose logits have some; record "
        "with --level advanced."
    ),
    "training basic": (
        "Level basic of a training names only the first module with NaN or Inf; level advanced "
        "records all modules of such a step, level extreme those of every step."
    ),
    "training advanced": (
        "Level advanced of a training records modules only in steps with NaN or Inf; record with "
        "level extreme."
    ),
}
"""What a level records of layers, where that may be nothing."""


def _missing_statistics(source: Source, place: TracePlace, window: StepWindow) -> Missing:
    """Return what is known of NaN and Inf without statistics, and the level that records them."""
    is_training = training_facts(source, place.generation) is not None
    level = str(source.reader.run().get("level") or "basic")
    otherwise = "'flexinspect dump' shows whether the hook of the modules was disabled."
    hint = _HINTS.get(f"training {level}" if is_training else level, otherwise)
    found = "no layer with NaN or Inf was found."
    if is_training:
        found = _describe_training_origin(source, place, window)
    reason = f"No layer statistics are recorded in {window.format_steps()}"
    return Missing(f"{reason}; {found}", import_hint(source, hint))


def _describe_training_origin(source: Source, place: TracePlace, window: StepWindow) -> str:
    """Return the first origin of NaN or Inf in the steps of a training."""
    where = (place.generation, place.branch, window.start, window.stop)
    for number, step in source.reader.training_steps(*where).items():
        origin = step.anomaly_origin
        if origin is not None and origin.kind not in ("explosion", "vanishing"):
            return f"in step {number} {describe_producer(origin)}"
        if step.n_nonfinite or step.is_loss_anomaly:
            return f"step {number} is the first with NaN or Inf, and its origin is not recorded."
    return "no NaN or Inf was found."


class LayersOptions(Struct, frozen=True):
    """`measure` colours the cells; `module` is one within the layer, "" for the layer itself."""

    measure: queries.Statistic = "norm"
    module: str = ""


class LayersPanel(Panel[LayersData, LayersOptions]):
    """Layers down, steps across, coloured by a statistic; the first bad output is marked."""

    name = "layers"
    title = "Layers"
    initial_options = LayersOptions()
    help = Help(
        "It shows one statistic of every layer's output at every step: norm, largest absolute "
        "value, mean, standard deviation, or NaN and Inf.",
        "Layers go down and steps across; bright is high, red or ! is NaN or Inf, X marks the "
        "first one, grey or · is not recorded; the numbers at the right are those of this step.",
        "Look for the X: NaN or Inf began in this layer and step, and later layers and steps only "
        "inherit it; look also for a row or column that differs from its neighbours.",
    )
    depends_on_size = True
    cycles: ClassVar = {"view.measure": ("measure", tuple(MEASURES))}
    actions = (*cycles, "view.flip", "cursor.enter")

    def load(self, source: Source, request: Request[LayersOptions]) -> LayersData:
        """Read the window of steps that fits, and find the first NaN or Inf of the branch."""
        reader, place, measure = source.reader, request.place, request.options.measure
        owner = queries.branch_of_step(reader, place.generation, place.step, place.branch)
        step_stats = tuple(reader.layer_stats(place.generation, place.step, owner))
        max_steps = max(MAX_CELLS // max(len(step_stats), 1), 8)
        window = load_step_window(reader, place, min(_grid_width(request.width), max_steps))
        span = (place.generation, window.start, window.stop, place.branch)
        cells = queries.layer_stats_range(reader, *span, statistic=measure)
        first_bad = find_first_bad(source, place, window)
        if not cells and first_bad is None:
            raise _missing_statistics(source, place, window)
        lengths = {row.step: row.q_len for row in queries.step_range(reader, *span)}
        kinds = tuple(dict.fromkeys(module_kind(cell.layer, cell.module) for cell in cells))
        wanted = (kind for kind in (request.options.module, "", *kinds) if kind in kinds)
        kind = next(wanted, "")
        shown = [cell for cell in cells if module_kind(cell.layer, cell.module) == kind]
        layers = tuple(sorted({cell.layer for cell in shown}))
        values, n_bad = stat_arrays(shown, window, layers)
        if measure == "norm":
            values /= np.sqrt([max(lengths.get(step, 1), 1) for step in window.steps])
        return LayersData(
            place=place,
            window=window,
            measure=measure,
            kind=kind,
            kinds=kinds,
            layers=layers,
            values=values,
            n_bad=n_bad,
            step_stats=step_stats,
            rows=max(lengths.get(place.step, 1), 1),
            first_bad=first_bad,
        )

    def describe(self, data: LayersData) -> list[str]:
        """Return the first NaN or Inf, the current step as a table, and the measure's range."""
        first, last = data.window.first, data.window.last
        span = f"steps {first}-{last}" if last > first else f"step {first}"
        no_bad = f"No recorded layer output has NaN or Inf in {span}."
        lines = [data.first_bad.sentence() if data.first_bad else no_bad]
        lines += [*stat_table(data), _describe_range(data)]
        if len(data.kinds) > 1:
            names = ", ".join(format_kind(kind) for kind in data.kinds)
            lines.append(f"Modules recorded per layer: {names}; shown: {format_kind(data.kind)}.")
        return lines

    def paint(self, data: LayersData, request: Request[LayersOptions], theme: Theme) -> Picture:
        """Draw the grid with its legend, the place's layer, and the table if it fits."""
        pen, height, window = Pen(theme, request.width), request.height, data.window
        text = _describe_current_layer(data, pen)
        # The grid gets what the text leaves, and at least three fifths.
        room = min(len(data.layers), max(height - 2 - len(text), height * 3 // 5, height - 5))
        rows, strips = layer_rows(data, room), text
        if data.layers:
            strips = [_axis(data, pen), *_draw_grid(data, rows, pen)]
            strips += [_legend(data, rows, pen), *text]
        table = stat_table(data)[:-1]
        if data.step_stats and pen.width >= _TABLE_WIDTH and len(table) <= height - len(strips):
            strips += [pen.line((line, "muted")) for line in table]
        note = f"{MEASURES[data.measure]} · {window.format_steps()}"
        if bad := data.first_bad:
            note = f"first NaN/Inf: {bad.format_place()}, {bad.format_counts()}"

        def target(x: int, y: int) -> Navigate | None:
            step = window.step_at(x - _LABEL_WIDTH, _grid_width(pen.width))
            if step is None or not 1 <= y <= len(rows):
                return None
            layers = [data.layers[index] for index in rows[y - 1]]
            layer = data.place.layer if data.place.layer in layers else layers[0]
            return Navigate(step=step, layer=layer)

        return Picture(strips[:height], note, bad is not None, target)

    def on_action(
        self, action: str, data: LayersData, request: Request[LayersOptions]
    ) -> LayersOptions | Navigate | None:
        """Change the measure or the module, or go to the first NaN or Inf."""
        if action == "view.flip" and len(data.kinds) > 1:
            return request.with_next("module", data.kinds, data.kind)
        if action == "cursor.enter" and data.first_bad:
            return Navigate(step=data.first_bad.step, layer=data.first_bad.stat.layer)
        return super().on_action(action, data, request)


def _grid_width(width: int) -> int:
    spare = width - _LABEL_WIDTH
    return max(spare - _VALUE_WIDTH if spare >= 2 * _VALUE_WIDTH else spare, 1)


def layer_rows(data: LayersData, room: int) -> list[range]:
    """Return the indices of the layers of each line; neighbours share a line without room."""
    n_layers = len(data.layers)
    each = -(-n_layers // max(room, 1)) or 1
    return [range(at, min(at + each, n_layers)) for at in range(0, n_layers, each)]


def layer_levels(data: LayersData) -> npt.NDArray[np.int64]:
    """Return the level of every value, int64 (layers, steps); -1 where nothing is recorded."""
    low, high, logarithmic = data.scale()
    values = data.values
    if logarithmic:
        with np.errstate(divide="ignore", invalid="ignore"):
            values, low, high = np.log(values), float(np.log(low)), float(np.log(high))
    levels = heatmap.quantise(values, low, high, heatmap.CIVIDIS.size).astype(np.int64)
    levels[(data.n_bad > 0) | ~np.isfinite(data.values)] = _BAD_LEVEL
    levels[data.n_bad < 0] = -1
    return levels


def _draw_grid(data: LayersData, rows: list[range], pen: Pen) -> list[Strip]:
    levels = np.stack([layer_levels(data)[row].max(axis=0) for row in rows])
    levels[levels < 0] = _MISSING_LEVEL
    window, room = data.window, _grid_width(pen.width)
    each = window.columns_per_point(room)
    current = next((i for i, row in enumerate(rows) if _has_current(data, row)), -1)
    marked, levels = (current, window.current - window.start), levels[:, : room // each]
    cells = heatmap.boxes(
        levels.astype(np.uint8), heatmap.CIVIDIS_MISSING, pen.theme, cell_width=each, marked=marked
    )
    bad = data.first_bad
    mark = Segment("X", pen.style("cursor") if pen.theme.no_color else heatmap.BAD_CELL_STYLE)
    strips = []
    for row, strip in zip(rows, cells, strict=True):
        if bad is not None and bad.stat.layer in [data.layers[index] for index in row]:
            at = (bad.step - window.start) * each + (each - 1) // 2
            strip = heatmap.replace_cells(strip, at, mark) if 0 <= at < strip.cell_length else strip
        parts = [_label(data, row, pen), strip, _value(data, row, pen)]
        strips.append(join_strips(*parts).adjust_cell_length(pen.width, pen.style("text")))
    return strips


def _has_current(data: LayersData, row: range) -> bool:
    return any(data.layers[index] == data.place.layer for index in row)


def _label(data: LayersData, row: range, pen: Pen) -> Strip:
    first, last = data.layers[row[0]], data.layers[row[-1]]
    name = align_right(str(first) if first == last else f"{first}-{last}", _LABEL_WIDTH - 2)
    mark, style = ("▸", "chosen") if _has_current(data, row) else (" ", "muted")
    return pen.resize(_LABEL_WIDTH).line((f"{mark}{name} ", style))


def _value(data: LayersData, row: range, pen: Pen) -> Strip:
    """Draw the row's value at the current step; the largest one where layers share a line."""
    column = data.window.current - data.window.start
    n_bad, values = data.n_bad[row, column], data.values[row, column]
    largest = values[np.nanargmax(np.abs(values))] if not np.isnan(values).all() else np.nan
    text, style = format_number(float(largest), _VALUE_WIDTH - 1), "text"
    if (n_bad < 0).all():
        text, style = "-", "muted"
    elif data.measure == "bad" or (n_bad > 0).any():
        count = int(n_bad[n_bad > 0].sum())
        text, style = f"{count} bad", "bad" if count else "muted"
    return pen.resize(_VALUE_WIDTH).line((align_right(text, _VALUE_WIDTH), style))


def _axis(data: LayersData, pen: Pen) -> Strip:
    window, room = data.window, _grid_width(pen.width)
    each = window.columns_per_point(room)
    at = (window.current - window.start) * each + (each - 1) // 2
    name = f"step {window.current}"
    before = at >= len(name) + 1 and at + 1 + len(name) > room
    text = " " * (at - len(name)) + name + "▾" if before else " " * at + "▾" + name
    return pen.line((align_right("layer", _LABEL_WIDTH - 1) + " ", "muted"), (text, "chosen"))


def _legend(data: LayersData, rows: list[range], pen: Pen) -> Strip:
    low, high, logarithmic = data.scale()
    kind = f" of {format_kind(data.kind)}" if data.kind else ""
    spans: list[NamedSpan] = [(f"{MEASURES[data.measure]}{kind} ", "title")]
    if data.measure != "bad":
        scale = heatmap.draw_scale(heatmap.CIVIDIS, pen.theme)
        spans += [(f"{format_number(low)} ", "text"), *scale, (f" {format_number(high)}", "text")]
        spans += [(" log", "muted")] if logarithmic else []
    remarks = []
    if (data.n_bad > 0).any():
        remarks.append("! NaN/Inf" if pen.theme.no_color else "red NaN/Inf")
    if rows and len(rows[0]) > 1:
        remarks.append(f"highest of {len(rows[0])} layers")
    if (data.n_bad < 0).any():
        remarks.append("· not recorded" if pen.theme.no_color else "grey not recorded")
    for remark in remarks:
        spans = [*drop_cut_span([*spans, (f"  {remark}", "muted")], pen.width)]
    return pen.line(*spans)


def _describe_current_layer(data: LayersData, pen: Pen) -> list[Strip]:
    """Draw the first NaN or Inf and the statistics of the place's layer, as wrapped lines."""
    strips = pen.paragraph(data.first_bad.sentence(), "bad") if data.first_bad else []
    layer = data.place.layer
    own = (s for s in data.step_stats if s.layer == layer)
    stat = next((s for s in own if module_kind(layer, s.module) == data.kind), None)
    if stat is None:
        text = f"No statistics of layer {layer} at step {data.window.current}"
    else:
        values = (stat.norm, stat.min, stat.max, stat.mean, stat.std)
        norm, low, high, mean, std = map(format_number, values)
        text = f"Layer {stat.layer}: norm {norm}, {low} to {high}, mean {mean}, std {std}"
        if stat.n_nan or stat.n_inf:
            text += f", {stat.n_nan} NaN, {stat.n_inf} Inf"
    return [*strips, *pen.paragraph(f"{text}.", "muted")]
