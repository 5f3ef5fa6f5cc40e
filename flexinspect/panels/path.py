"""The path panel: which attention kernel each layer ran at each step, and with which mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import ClassVar

from rich.style import Style
from textual.strip import Strip

from flexinspect.panels.base import Go, Help, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.pathdata import LETTERS, NONE, PathData, Rows, load_paths, merged
from flexinspect.panels.parts.pathwords import describe_map, describe_step, warnings
from flexinspect.panels.source import Source
from flexinspect.text import visible
from flexinspect.trace.callranges import spans
from flexinspect.widgets.lines import Span, line, paragraph
from flexinspect.widgets.look import Look

_BANDS: Mapping[str, int] = {"F": 0, "C": 2, "S": 1, "E": 3, "?": 6}
"""Which of the look's backgrounds a path has."""

_LABEL, _GATE = 8, 8


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
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> PathData:
        """Read the window of steps that fits the width, in one query, and the current step."""
        return load_paths(source.reader, request.place, request.width - _LABEL - _GATE)

    def describe(self, data: PathData) -> list[str]:
        """Return what ran: the layers that differ first, then the current step, then the map."""
        return [*warnings(data), *describe_step(data), *describe_map(data)]

    def paint(self, data: PathData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw the map, and as much of the current step in words as there is room for."""
        width, height = request.width, request.height
        words = _words(data, width, look)
        room = _room(data, request)
        rows, top = shown_rows(data, room)
        strips = [_axis(data, width, look)]
        strips += [_map_row(data, row, width, look) for row in rows[top : top + room]]
        strips.append(_legend(data, width, look))
        odd = warnings(data)
        note = odd[0] if odd else data.span()
        return Picture([*strips, *words][:height], visible(note), alarm=bool(odd))

    def point(
        self, x: int, y: int, data: PathData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the step and layer of the cell that was clicked."""
        room = _room(data, request)
        rows, top = shown_rows(data, room)
        column = (x - _LABEL) // _cell_width(data, request.width)
        index = top + y - 1
        if not click or x < _LABEL or not 1 <= y <= room or index >= len(rows):
            return None
        step = data.start + column
        if step >= data.stop:
            return None
        layers = rows[index][0]
        layer = data.place.layer if data.place.layer in layers else layers[0]
        return Go(step=step, layer=layer)


def _room(data: PathData, request: Request[NoOptions]) -> int:
    """Return how many rows the map may take: what the words leave, and three fifths at least."""
    n_words = len(_words(data, request.width, Look("none")))
    height = request.height
    return max(min(height - 2, max(height * 3 // 5, height - 2 - n_words)), 0)


def shown_rows(data: PathData, room: int) -> tuple[list[Rows], int]:
    """Return the rows of the map and the first that is shown: each layer, or merged to fit."""
    rows: list[Rows] = [((layer,), data.row(layer)) for layer in data.layers]
    if len(rows) > room:
        rows = merged(data)
    here = next((i for i, (layers, _) in enumerate(rows) if data.place.layer in layers), 0)
    return rows, max(0, min(here - room // 2, len(rows) - room))


def _cell_width(data: PathData, width: int) -> int:
    fits = (width - _LABEL - _GATE) // max(data.stop - data.start, 1)
    return max(1, min(fits, 3))


def _axis(data: PathData, width: int, look: Look) -> Strip:
    cell = _cell_width(data, width)
    n_cells = (data.stop - data.start) * cell
    marks = [" "] * (n_cells + 8)
    here = (data.place.step - data.start) * cell + cell // 2
    if 0 <= here < n_cells:
        _put(marks, here, f"▾{data.place.step}")
    offset = cell // 2  # above the letter, which stands in the middle of its cell
    stride = 10 if cell == 1 else 5 if cell == 2 else 2
    for step in range(-(-data.start // stride) * stride, data.stop, stride):
        at = (step - data.start) * cell + offset
        if at + len(str(step)) <= n_cells and all(
            mark == " " for mark in marks[max(at - 1, 0) : at + len(str(step)) + 1]
        ):
            _put(marks, at, str(step))
    axis = "".join(marks)[: n_cells + (8 if not data.now.gates else 0)]
    spans_ = [("step".ljust(_LABEL), look.style("muted")), (axis, look.style("muted"))]
    if data.now.gates:
        spans_.append((" gate", look.style("muted")))
    return line(spans_, width, look.style("text"))


def _put(marks: list[str], at: int, text: str) -> None:
    at = min(at, len(marks) - len(text))
    marks[at : at + len(text)] = text


def _map_row(data: PathData, row: Rows, width: int, look: Look) -> Strip:
    layers, letters = row
    chosen = data.place.layer in layers
    label = f"{'▸' if chosen else ' '}{spans(layers)}"[: _LABEL - 1].ljust(_LABEL)
    pieces: list[Span] = [(label, look.style("chosen" if chosen else "muted"))]
    cell = _cell_width(data, width)
    styled = [
        (letter, _cell_style(data, data.start + column, letter, look))
        for column, letter in enumerate(letters)
    ]
    for style, run in groupby(styled, key=lambda pair: pair[1]):
        pieces.append(("".join(letter.center(cell) for letter, _ in run), style))
    gates = [data.now.gates[layer] for layer in layers if layer in data.now.gates]
    if gates:
        worst = math.nan if any(math.isnan(gate) for gate in gates) else max(gates)
        pieces.append((f" {worst:.0e}" if worst else " 0", look.style("muted")))
    return line(pieces, width, look.style("text"))


def _cell_style(data: PathData, step: int, letter: str, look: Look) -> Style:
    if letter == NONE:
        return look.style("muted")
    if letter != data.usual.get(step):
        return look.style("bad") + Style(reverse=True)
    if step == data.place.step:
        return look.style("cursor")
    return look.style("text") if look.plain else look.band(_BANDS[letter])


def _legend(data: PathData, width: int, look: Look) -> Strip:
    pieces: list[Span] = []
    for path in data.paths:
        letter = LETTERS[path]
        style = look.style("strong") if look.plain else look.band(_BANDS[letter])
        pieces += [(letter, style), (f" {path}  ", look.style("muted"))]
    return line(pieces, width, look.style("text"))


def _words(data: PathData, width: int, look: Look) -> list[Strip]:
    odd = [strip for text in warnings(data) for strip in paragraph(text, width, look.style("bad"))]
    rest = [
        strip
        for text in describe_step(data)
        for strip in paragraph(text, width, look.style("text"))
    ]
    return [*odd, *rest]
