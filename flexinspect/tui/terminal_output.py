"""Output to the terminal: only the cells that changed, with short escape codes.

Textual writes every updated widget again, and each piece of text with all of its colours. From one
step of the model to the next a small part of these cells changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import ne
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

_MAX_CACHED = 1 << 14
_MAX_GAP = 3
"""Unchanged cells between two changed ones that are written again: moving the cursor is longer."""
_ENDS = {"": "", "1": "22", "2": "22", "3": "23", "4": "24", "7": "27"}
"""SGR parameters that end attributes; others are ended by a reset, which ends colours too."""


class CellStyle(NamedTuple):
    """How a cell is drawn: parameters of SGR escape codes, "" for those of the terminal.

    `color` is None for a blank, which looks the same in all colours.
    """

    attributes: str
    color: str | None
    background: str


Cell = tuple[str, CellStyle]
"""One cell of the terminal. A text with characters of other widths than one cell is not divided:
its first cell has all of it, the others are empty."""

Piece = tuple[int, int, Strip]
"""Row and column of a strip on the terminal, counted from 0, and the strip."""


class TerminalCells:
    """The cells that the terminal shows, as far as they are known."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Cell | None]] = {}
        self._wide_rows: set[int] = set()

    def forget(self) -> None:
        """Write all cells of the next update: the terminal may have lost its content."""
        self._rows.clear()
        self._wide_rows.clear()

    def limit(self, update: RenderableType | None) -> Any:
        """Return an update that writes only the cells of `update` that changed."""
        if isinstance(update, ChopsUpdate):
            return _ChangedCells(self, _updated_pieces(update))
        if isinstance(update, LayoutUpdate):
            return _ChangedCells(self, _all_pieces(update))
        return update

    def replace(
        self, row: int, column: int, cells: Sequence[Cell], *, is_wide: bool
    ) -> Iterator[tuple[int, int]]:
        """Record the cells of a row from `column` on; yield the ranges of them that changed.

        `is_wide` is whether a character of them takes another width than one cell. Then all of
        them are written, and also later ones of this row: terminals disagree about such widths.
        """
        shown, end = self._rows.setdefault(row, []), column + len(cells)
        shown.extend([None] * (end - len(shown)))
        before, shown[column:end] = shown[column:end], cells
        if before == cells:
            return
        if is_wide:
            self._wide_rows.add(row)
        if row in self._wide_rows:
            yield 0, len(cells)
            return
        changed = [at for at, differs in enumerate(map(ne, before, cells)) if differs]
        start = 0
        for index, at in enumerate(changed, 1):
            if index == len(changed) or changed[index] - at > _MAX_GAP:
                yield changed[start], at + 1
                start = index


class _ChangedCells(CompositorUpdate):
    """An update of the screen without the cells that the terminal shows already."""

    def __init__(self, terminal: TerminalCells, pieces: Iterable[Piece]) -> None:
        self._terminal, self._pieces = terminal, pieces

    def render_segments(self, console: Console) -> str:
        """Return the text with escape codes; see `CompositorUpdate.render_segments`."""
        depth = console._color_system or ColorSystem.TRUECOLOR
        output = _Output()
        for row, column, strip in self._pieces:
            cells, is_wide = _cells(strip, depth)
            for start, end in self._terminal.replace(row, column, cells, is_wide=is_wide):
                output.write(row, column + start, cells[start:end])
        return output.text()


class _Output:
    """Text with escape codes, which sets what differs from the style before."""

    def __init__(self) -> None:
        self._codes: list[str] = []
        self._attributes = self._color = self._background = ""

    def write(self, row: int, column: int, cells: Iterable[Cell]) -> None:
        codes = self._codes
        codes.append(f"\x1b[{row + 1};{column + 1}H")
        last = None
        for text, style in cells:
            if style is not last:
                last = style
                attributes, color, background = style
                # Each cell of a picture may have two other colours: this is done without a call.
                if attributes or self._attributes or color is None:
                    codes.append(self._change(style))
                elif color == self._color:
                    if background != self._background:
                        codes.append(f"\x1b[{background or 49}m")
                        self._background = background
                elif background == self._background:
                    codes.append(f"\x1b[{color or 39}m")
                    self._color = color
                else:
                    codes.append(f"\x1b[{color or 39};{background or 49}m")
                    self._color, self._background = color, background
            codes.append(text)

    def text(self) -> str:
        return "".join([*self._codes, "\x1b[0m"]) if self._codes else ""

    def _change(self, style: CellStyle) -> str:
        """Set a style; return its escape code."""
        attributes, color, background = style
        codes = ""
        if attributes != self._attributes:
            end = _ENDS.get(self._attributes, "0")
            if end == "0":
                self._color = self._background = ""
            codes = "".join(f";{code}" for code in (end, attributes) if code)
            self._attributes = attributes
        if color is not None and color != self._color:
            codes += f";{color or 39}"
            self._color = color
        if background != self._background:
            codes += f";{background or 49}"
            self._background = background
        return f"\x1b[{codes[1:]}m" if codes else ""


def _updated_pieces(update: ChopsUpdate) -> Iterator[Piece]:
    for row, first, last in update.spans:
        pieces = zip(update.chops[row].items(), update.chop_ends[row], strict=False)
        for (column, strip), end in pieces:
            if strip is not None and column < last and end > first:
                yield row, column, strip.crop(0, min(end, last) - column)


def _all_pieces(update: LayoutUpdate) -> Iterator[Piece]:
    left, top = update.region.offset
    for row, strips in enumerate(update.strips, top):
        column = left
        for strip in strips:
            yield row, column, strip
            column += strip.cell_length


class _NarrowCells:
    """The cells of segments whose characters take one cell each, by the ids of the segments.

    Pictures are drawn with the same segments again and again. The segments are kept, so that no
    other one gets the id of one of them.
    """

    def __init__(self, depth: ColorSystem) -> None:
        self._depth = depth
        self._cells: dict[int, list[Cell]] = {}
        self._segments: list[Segment] = []

    def join(self, strip: Strip) -> list[Cell] | None:
        """Return the cells of a strip, None if a character of it takes another width."""
        known, segments = self._cells, [*strip]
        try:
            return [*chain.from_iterable([known[key] for key in map(id, segments)])]
        except KeyError:
            return self._add(segments)

    def _add(self, segments: Sequence[Segment]) -> list[Cell] | None:
        if len(self._segments) >= _MAX_CACHED:
            self._cells.clear()
            self._segments.clear()
        cells: list[Cell] = []
        for segment in segments:
            own = self._cells.get(id(segment))
            if own is None:
                text, style, _ = segment
                if not (text.isascii() or _is_narrow(text)):
                    return None
                drawn, blank = _cell_styles(style or Style.null(), self._depth)
                own = [(letter, blank if letter == " " else drawn) for letter in text]
                self._cells[id(segment)] = own
                self._segments.append(segment)
            cells += own
        return cells


_narrow_cells = lru_cache(_NarrowCells)


def _cells(strip: Strip, depth: ColorSystem) -> tuple[list[Cell], bool]:
    """Return the cells of a strip, and whether it has characters of other widths than one cell."""
    narrow = _narrow_cells(depth).join(strip)
    if narrow is not None:
        return narrow, False
    cells: list[Cell] = []
    for text, style, _ in strip:
        drawn, blank = _cell_styles(style or Style.null(), depth)
        if text.isascii() or _is_narrow(text):
            cells += [(letter, blank if letter == " " else drawn) for letter in text]
        elif width := cell_len(text):
            cells += [(text, drawn), *[("", drawn)] * (width - 1)]
        elif cells:  # combining marks
            cells[-1] = (cells[-1][0] + text, cells[-1][1])
    return cells, True


@lru_cache(_MAX_CACHED)
def _is_narrow(text: str) -> bool:
    return all(cell_len(character) == 1 for character in text)


@lru_cache(_MAX_CACHED)
def _cell_styles(style: Style, depth: ColorSystem) -> tuple[CellStyle, CellStyle]:
    """Return how text in this style is drawn, and how its blanks are."""
    color, background = (
        ";".join(value.downgrade(depth).get_ansi_codes(foreground)) if value is not None else ""
        for value, foreground in ((style.color, True), (style.bgcolor, False))
    )
    attributes = Strip.render_ansi(style.without_color, depth)
    drawn = CellStyle(attributes, color, background)
    return drawn, drawn if attributes else drawn._replace(color=None)
