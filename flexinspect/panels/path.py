"""The path panel: which attention kernel each layer ran at each step, and with which mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import ClassVar

from rich.style import Style
from textual.strip import Strip

from flexinspect.panels.base import Help, Navigate, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.pathdata import (
    NO_CALL,
    PATH_LETTERS,
    LayerRow,
    PathData,
    load_paths,
    merge_layers,
)
from flexinspect.panels.parts.pathwords import describe_map, describe_step, describe_warnings
from flexinspect.panels.source import Source
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import format_ranges
from flexinspect.widgets.lines import Span, line, wrap_paragraph
from flexinspect.widgets.look import Theme

_PATH_COLORS: Mapping[str, int] = {"F": 0, "C": 2, "S": 1, "E": 3, "?": 6}
"""Which of the look's backgrounds a path has."""

_LABEL_WIDTH, _LSE_CHECK_WIDTH = 8, 8


class PathPanel(Panel[PathData, NoOptions]):
    """Layers down, steps across, one letter and colour per kernel path."""

    name: ClassVar[str] = "path"
    title: ClassVar[str] = "Path"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows which attention kernel every layer really ran at every step, and with which "
        "mask.",
        "Layers go down, steps go across; F is uncompiled flex, C compiled flex, S sdpa, E eager, "
        "? another backend, · no call recorded; click a cell to go there.",
        "Look for a letter that differs from the rest of its column: that layer fell back without "
        "a word, and your mask may not have run in it.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> PathData:
        """Read the window of steps that fits the width, in one query, and the current step."""
        return load_paths(
            source.reader, request.place, request.width - _LABEL_WIDTH - _LSE_CHECK_WIDTH
        )

    def describe(self, data: PathData) -> list[str]:
        """Return what ran: the layers that differ first, then the current step, then the map."""
        return [*describe_warnings(data), *describe_step(data), *describe_map(data)]

    def paint(self, data: PathData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the map, and as much of the current step in words as there is room for."""
        width, height = request.width, request.height
        words = _draw_description(data, width, theme)
        room = _map_height(data, request)
        rows, top = shown_rows(data, room)
        strips = [_axis(data, width, theme)]
        strips += [_map_row(data, row, width, theme) for row in rows[top : top + room]]
        strips.append(_legend(data, width, theme))
        odd = describe_warnings(data)
        note = odd[0] if odd else data.format_steps()
        return Picture([*strips, *words][:height], escape_unprintable(note), alarm=bool(odd))

    def on_mouse(
        self, x: int, y: int, data: PathData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step and layer of the cell that was clicked."""
        room = _map_height(data, request)
        rows, top = shown_rows(data, room)
        column = (x - _LABEL_WIDTH) // _cell_width(data, request.width)
        index = top + y - 1
        if not click or x < _LABEL_WIDTH or not 1 <= y <= room or index >= len(rows):
            return None
        step = data.start + column
        if step >= data.stop:
            return None
        layers = rows[index][0]
        layer = data.place.layer if data.place.layer in layers else layers[0]
        return Navigate(step=step, layer=layer)


def _map_height(data: PathData, request: Request[NoOptions]) -> int:
    """Return how many rows the map may take: what the words leave, and three fifths at least."""
    n_words = len(_draw_description(data, request.width, Theme("none")))
    height = request.height
    return max(min(height - 2, max(height * 3 // 5, height - 2 - n_words)), 0)


def shown_rows(data: PathData, room: int) -> tuple[list[LayerRow], int]:
    """Return the rows of the map and the first that is shown: each layer, or merged to fit."""
    rows: list[LayerRow] = [((layer,), data.layer_letters(layer)) for layer in data.layers]
    if len(rows) > room:
        rows = merge_layers(data)
    here = next((i for i, (layers, _) in enumerate(rows) if data.place.layer in layers), 0)
    return rows, max(0, min(here - room // 2, len(rows) - room))


def _cell_width(data: PathData, width: int) -> int:
    fits = (width - _LABEL_WIDTH - _LSE_CHECK_WIDTH) // max(data.stop - data.start, 1)
    return max(1, min(fits, 3))


def _axis(data: PathData, width: int, theme: Theme) -> Strip:
    cell = _cell_width(data, width)
    n_cells = (data.stop - data.start) * cell
    marks = [" "] * (n_cells + 8)
    here = (data.place.step - data.start) * cell + cell // 2
    if 0 <= here < n_cells:
        _write_marks(marks, here, f"▾{data.place.step}")
    offset = cell // 2  # above the letter, which stands in the middle of its cell
    stride = 10 if cell == 1 else 5 if cell == 2 else 2
    for step in range(-(-data.start // stride) * stride, data.stop, stride):
        at = (step - data.start) * cell + offset
        if at + len(str(step)) <= n_cells and all(
            mark == " " for mark in marks[max(at - 1, 0) : at + len(str(step)) + 1]
        ):
            _write_marks(marks, at, str(step))
    axis = "".join(marks)[: n_cells + (8 if not data.details.lse_errors else 0)]
    spans_ = [("step".ljust(_LABEL_WIDTH), theme.style("muted")), (axis, theme.style("muted"))]
    if data.details.lse_errors:
        spans_.append((" gate", theme.style("muted")))
    return line(spans_, width, theme.style("text"))


def _write_marks(marks: list[str], at: int, text: str) -> None:
    at = min(at, len(marks) - len(text))
    marks[at : at + len(text)] = text


def _map_row(data: PathData, row: LayerRow, width: int, theme: Theme) -> Strip:
    layers, letters = row
    chosen = data.place.layer in layers
    label = f"{'▸' if chosen else ' '}{format_ranges(layers)}"[: _LABEL_WIDTH - 1].ljust(
        _LABEL_WIDTH
    )
    pieces: list[Span] = [(label, theme.style("chosen" if chosen else "muted"))]
    cell = _cell_width(data, width)
    styled = [
        (letter, _cell_style(data, data.start + column, letter, theme))
        for column, letter in enumerate(letters)
    ]
    for style, run in groupby(styled, key=lambda pair: pair[1]):
        pieces.append(("".join(letter.center(cell) for letter, _ in run), style))
    gates = [data.details.lse_errors[layer] for layer in layers if layer in data.details.lse_errors]
    if gates:
        worst = math.nan if any(math.isnan(error) for error in gates) else max(gates)
        pieces.append((f" {worst:.0e}" if worst else " 0", theme.style("muted")))
    return line(pieces, width, theme.style("text"))


def _cell_style(data: PathData, step: int, letter: str, theme: Theme) -> Style:
    if letter == NO_CALL:
        return theme.style("muted")
    if letter != data.usual_letters.get(step):
        return theme.style("bad") + Style(reverse=True)
    if step == data.place.step:
        return theme.style("cursor")
    return theme.style("text") if theme.no_color else theme.segment_style(_PATH_COLORS[letter])


def _legend(data: PathData, width: int, theme: Theme) -> Strip:
    pieces: list[Span] = []
    for path in data.paths:
        letter = PATH_LETTERS[path]
        style = (
            theme.style("strong") if theme.no_color else theme.segment_style(_PATH_COLORS[letter])
        )
        pieces += [(letter, style), (f" {path}  ", theme.style("muted"))]
    return line(pieces, width, theme.style("text"))


def _draw_description(data: PathData, width: int, theme: Theme) -> list[Strip]:
    odd = [
        strip
        for text in describe_warnings(data)
        for strip in wrap_paragraph(text, width, theme.style("bad"))
    ]
    rest = [
        strip
        for text in describe_step(data)
        for strip in wrap_paragraph(text, width, theme.style("text"))
    ]
    return [*odd, *rest]
