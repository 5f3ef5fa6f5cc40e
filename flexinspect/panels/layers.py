"""The layers panel: statistics of every layer's output at every step, and where NaN began."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.colormap import CIVIDIS, CIVIDIS_MARKED, Palette, quantise
from flexinspect.panels.base import Help, Navigate, Panel, Picture, Request
from flexinspect.panels.parts.layersdata import (
    MEASURES,
    LayersData,
    describe_layers,
    format_kind,
    load_layers,
    stat_table,
)
from flexinspect.panels.parts.windows import columns_per_step, drop_cut_span, step_at
from flexinspect.panels.source import Source
from flexinspect.trace.ranges import Statistic
from flexinspect.widgets.heat import boxes
from flexinspect.widgets.lines import Span, align_right, line, wrap_paragraph
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import format_number

_LABEL_WIDTH, _VALUE_WIDTH = 7, 9
_BAD_LEVEL, _MISSING_LEVEL = CIVIDIS.size, CIVIDIS.size + 1

LAYERS_PALETTE = Palette([*CIVIDIS_MARKED.rgb, (58, 58, 62)], CIVIDIS_MARKED.ramp + "·")
"""`CIVIDIS_MARKED` and a last level, dark grey, for what was not recorded."""

_MARK_STYLE = Style.parse("bold #ffffff on #e6283c")
_TABLE_WIDTH = 90


@dataclass(frozen=True, slots=True)
class LayersOptions:
    """`measure` colours the cells; `module` names one within the layer, "" the layer itself."""

    measure: Statistic = "norm"
    module: str = ""


class LayersPanel(Panel[LayersData, LayersOptions]):
    """Layers down, steps across, coloured by a statistic; the first bad output is marked."""

    name: ClassVar[str] = "layers"
    title: ClassVar[str] = "Layers"
    help: ClassVar[Help] = Help(
        "It shows one statistic of every layer's output at every step: norm, largest absolute "
        "value, mean, standard deviation, or NaN and Inf.",
        "Layers go down and steps across; light is high, red or ! is NaN or Inf, X the first of "
        "them, grey or · not recorded; the numbers at the right are this step's.",
        "Look for the X: the lowest layer of the earliest step is where it began, and what "
        "follows only inherits it; look also for a row or column unlike its neighbours.",
    )
    depends_on_size: ClassVar[bool] = True
    actions: ClassVar[tuple[str, ...]] = ("view.measure", "view.flip", "cursor.enter")

    def options(self) -> LayersOptions:
        """Return the norm of the layers themselves."""
        return LayersOptions()

    def load(self, source: Source, request: Request[LayersOptions]) -> LayersData:
        """Read the window of steps that fits, and find the first bad output of the branch."""
        options = request.options
        columns = _grid_width(request.width)
        return load_layers(source, request.place, columns, options.measure, options.module)

    def describe(self, data: LayersData) -> list[str]:
        """Return what is bad, the current step as a table, and the range of the measure."""
        return describe_layers(data)

    def paint(self, data: LayersData, request: Request[LayersOptions], theme: Theme) -> Picture:
        """Draw the strips, their legend, and the place's layer in words."""
        width, height = request.width, request.height
        rows = layer_rows(data, _grid_height(data, width, height))
        strips = [_axis(data, width, theme)] if data.layers else []
        strips += _draw_grid(data, rows, width, theme)
        strips += [_legend(data, rows, width, theme)] if data.layers else []
        strips += _describe_current_layer(data, width, theme)
        strips += _draw_stat_table(data, width, height - len(strips), theme)
        note = f"{MEASURES[data.measure]} · {data.window.format_steps()}"
        if data.first_bad:
            note = (
                f"first NaN/Inf: {data.first_bad.format_place()}, {data.first_bad.format_counts()}"
            )
        return Picture(strips[:height], note, alarm=data.first_bad is not None)

    def on_action(
        self, action: str, data: LayersData, request: Request[LayersOptions]
    ) -> LayersOptions | Navigate | None:
        """Change the measure or the module, or go to the first bad output."""
        if action == "view.measure":
            names = list(MEASURES)
            after = names[(names.index(request.options.measure) + 1) % len(names)]
            return replace(request.options, measure=after)
        if action == "view.flip" and len(data.kinds) > 1:
            after_kind = data.kinds[(data.kinds.index(data.kind) + 1) % len(data.kinds)]
            return replace(request.options, module=after_kind)
        if action == "cursor.enter" and data.first_bad:
            return Navigate(step=data.first_bad.step, layer=data.first_bad.stat.layer)
        return None

    def on_mouse(
        self, x: int, y: int, data: LayersData, request: Request[LayersOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step and layer of the cell that was clicked."""
        rows = layer_rows(data, _grid_height(data, request.width, request.height))
        step = step_at(x - _LABEL_WIDTH, data.window, _grid_width(request.width))
        if not click or step is None or not 1 <= y <= len(rows):
            return None
        layers = [data.layers[index] for index in rows[y - 1]]
        return Navigate(
            step=step, layer=data.place.layer if data.place.layer in layers else layers[0]
        )


def _grid_width(width: int) -> int:
    spare = width - _LABEL_WIDTH
    return max(spare - _VALUE_WIDTH if spare >= 2 * _VALUE_WIDTH else spare, 1)


def _grid_height(data: LayersData, width: int, height: int) -> int:
    """Return the lines that the layers may take: words give way to them, but not all."""
    n_words = len(_describe_current_layer(data, width, Theme("none")))
    return max(min(len(data.layers), max(height - 2 - n_words, height * 3 // 5, height - 5)), 1)


def layer_rows(data: LayersData, room: int) -> list[range]:
    """Return the layers, as indices, of each line: neighbours share one where there are many."""
    n_layers = len(data.layers)
    each = -(-n_layers // max(room, 1)) or 1
    return [range(at, min(at + each, n_layers)) for at in range(0, n_layers, each)]


def layer_levels(data: LayersData) -> npt.NDArray[np.int64]:
    """Return the level of every value, (layers, steps): -1 where nothing is recorded."""
    low, high, logarithmic = data.scale()
    values = data.values
    if logarithmic:
        with np.errstate(divide="ignore", invalid="ignore"):
            values, low, high = np.log(values), float(np.log(low)), float(np.log(high))
    levels = quantise(values, low, high, CIVIDIS.size).astype(np.int64)
    levels[(data.n_bad > 0) | ~np.isfinite(data.values)] = _BAD_LEVEL
    levels[data.n_bad < 0] = -1
    return levels


def _draw_grid(data: LayersData, rows: list[range], width: int, theme: Theme) -> list[Strip]:
    if not rows:
        return []
    levels = np.stack([layer_levels(data)[row].max(axis=0) for row in rows])
    levels[levels < 0] = _MISSING_LEVEL
    window, room = data.window, _grid_width(width)
    each = columns_per_step(window, room)
    mine = next((i for i, row in enumerate(rows) if _contains_current(data, row)), -1)
    cells = boxes(
        levels[:, : room // each].astype(np.uint8),
        LAYERS_PALETTE,
        theme,
        cell_width=each,
        marked=(mine, window.current - window.start),
    )
    strips = []
    for row, strip in zip(rows, cells, strict=True):
        drawn = _mark_bad(strip, data, row, each, theme)
        parts = [_label(data, row, theme), drawn, _value(data, row, theme)]
        strips.append(Strip.join(parts).adjust_cell_length(width, theme.style("text")))
    return strips


def _contains_current(data: LayersData, row: range) -> bool:
    return any(data.layers[index] == data.place.layer for index in row)


def _mark_bad(strip: Strip, data: LayersData, row: range, each: int, theme: Theme) -> Strip:
    """Return a line of cells with an X on the first bad output of the branch, if it is in it."""
    bad = data.first_bad
    if bad is None or bad.stat.layer not in [data.layers[index] for index in row]:
        return strip
    at = (bad.step - data.window.start) * each + (each - 1) // 2
    if not 0 <= at < strip.cell_length:
        return strip
    style = theme.style("cursor") if theme.no_color else _MARK_STYLE
    mark = Strip([Segment("X", style)], 1)
    return Strip.join([strip.crop(0, at), mark, strip.crop(at + 1, strip.cell_length)])


def _label(data: LayersData, row: range, theme: Theme) -> Strip:
    here = _contains_current(data, row)
    first, last = data.layers[row[0]], data.layers[row[-1]]
    name = str(first) if first == last else f"{first}-{last}"
    text = f"{'▸' if here else ' '}{align_right(name, _LABEL_WIDTH - 2)} "
    return line([(text, theme.style("chosen" if here else "muted"))], _LABEL_WIDTH)


def _value(data: LayersData, row: range, theme: Theme) -> Strip:
    """Return the row's value at the current step: the largest, where layers share a line."""
    column = data.window.current - data.window.start
    n_bad, values = data.n_bad[row, column], data.values[row, column]
    if (n_bad < 0).all():
        return line([(align_right("-", _VALUE_WIDTH), theme.style("muted"))], _VALUE_WIDTH)
    if data.measure == "bad" or (n_bad > 0).any():
        count = int(n_bad[n_bad > 0].sum())
        style = theme.style("bad" if count else "muted")
        return line([(align_right(f"{count} bad", _VALUE_WIDTH), style)], _VALUE_WIDTH)
    largest = values[np.nanargmax(np.abs(values))] if not np.isnan(values).all() else np.nan
    return line(
        [(" " + format_number(float(largest), _VALUE_WIDTH - 1), theme.style("text"))], _VALUE_WIDTH
    )


def _axis(data: LayersData, width: int, theme: Theme) -> Strip:
    """Return the line above the strips: the current step over its column."""
    window, room = data.window, _grid_width(width)
    each = columns_per_step(window, room)
    at = (window.current - window.start) * each + (each - 1) // 2
    name = f"step {window.current}"
    before = at >= len(name) + 1 and at + 1 + len(name) > room
    text = " " * (at - len(name)) + name + "▾" if before else " " * at + "▾" + name
    spans: list[Span] = [
        (align_right("layer", _LABEL_WIDTH - 1) + " ", theme.style("muted")),
        (text, theme.style("chosen")),
    ]
    return line(spans, width, theme.style("text"))


def _legend(data: LayersData, rows: list[range], width: int, theme: Theme) -> Strip:
    low, high, logarithmic = data.scale()
    text, muted = theme.style("text"), theme.style("muted")
    kind = f" of {format_kind(data.kind)}" if data.kind else ""
    spans: list[Span] = [(f"{MEASURES[data.measure]}{kind} ", theme.style("title"))]
    if data.measure != "bad":
        spans += [
            (f"{format_number(low)} ", text),
            *_draw_scale(theme),
            (f" {format_number(high)}", text),
        ]
        spans += [(" log", muted)] if logarithmic else []
    remarks = []
    if (data.n_bad > 0).any():
        remarks.append("! NaN/Inf" if theme.no_color else "red NaN/Inf")
    if rows and len(rows[0]) > 1:
        remarks.append(f"highest of {len(rows[0])} layers")
    if (data.n_bad < 0).any():
        remarks.append("· not recorded" if theme.no_color else "grey not recorded")
    for remark in remarks:
        spans = [*drop_cut_span([*spans, (f"  {remark}", muted)], width)]
    return line(spans, width, text)


def _draw_scale(theme: Theme) -> list[Span]:
    ramp = np.linspace(0, CIVIDIS.size - 1, 8).astype(np.uint8)[None]
    return [
        (segment.text, segment.style or theme.style("text"))
        for segment in boxes(ramp, LAYERS_PALETTE, theme, cell_width=1)[0]
    ]


def _describe_current_layer(data: LayersData, width: int, theme: Theme) -> list[Strip]:
    """Return the first bad output and the place's layer, as wrapped lines."""
    strips = (
        wrap_paragraph(data.first_bad.sentence(), width, theme.style("bad"))
        if data.first_bad
        else []
    )
    stat = data.current_stat()
    if stat is None:
        none = f"No statistics of layer {data.place.layer} at step {data.window.current}."
        return [*strips, *wrap_paragraph(none, width, theme.style("muted"))]
    words = (
        f"Layer {stat.layer}: norm {format_number(stat.norm)}, {format_number(stat.min)} to {format_number(stat.max)}, "
        f"mean {format_number(stat.mean)}, std {format_number(stat.std)}"
    )
    if stat.n_nan or stat.n_inf:
        words += f", {stat.n_nan} NaN, {stat.n_inf} Inf"
    return [*strips, *wrap_paragraph(f"{words}.", width, theme.style("muted"))]


def _draw_stat_table(data: LayersData, width: int, room: int, theme: Theme) -> list[Strip]:
    """Return the modules of the current step as a table, where all of it fits."""
    rows = stat_table(data)[:-1]
    if not data.step_stats or width < _TABLE_WIDTH or len(rows) > room:
        return []
    return [line([(row, theme.style("muted"))], width, theme.style("text")) for row in rows]
