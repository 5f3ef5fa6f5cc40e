"""The widget that shows ready-made strips: the one place where pictures meet Textual."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.theme import Theme


class Canvas(Widget):
    """Shows strips as they are.

    It overrides `render_lines`, which skips Textual's line filters and caches (they rebuild every
    segment and cost more than the picture); so borders and padding belong to its parent, and
    whoever makes the strips minds `NO_COLOR`.
    """

    ALLOW_SELECT = False
    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._strips: Sequence[Strip] = ()

    @property
    def strips(self) -> Sequence[Strip]:
        """What is shown."""
        return self._strips

    def show(self, strips: Sequence[Strip]) -> None:
        """Show these strips from the next repaint on."""
        self._strips = strips
        self.refresh()

    def repaint(self) -> None:
        """Make the strips again, in the size and colours of now; for subclasses."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region, cut and filled up to the widget's size."""
        width = self.size.width
        style = self.rich_style.without_color if self.app.no_color else self.rich_style
        strips = [
            strip if strip.cell_length == width else strip.adjust_cell_length(width, style)
            for strip in self._strips[crop.y : crop.bottom]
        ]
        if len(strips) < crop.height:
            strips += [Strip.blank(width, style)] * (crop.height - len(strips))
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips


Span = tuple[str, Style]
"""A piece of a line. Its text must be printable: pass what came from a model through `visible`."""


def line(spans: Iterable[Span], width: int, fill: Style | None = None) -> Strip:
    """Return the spans as a strip of exactly `width` cells, cut with "…" where they are longer.

    `fill` is the style of the cells behind the text. A wide character that does not fit whole
    leaves a blank. What is cut off is not mentioned if it is blank.
    """
    segments: list[Segment] = []
    left = max(width, 0)
    for text, style in spans:
        length = cell_len(text)
        if length > left and text.strip():
            return Strip(_shorten_segments(segments, text, style, left), max(width, 0))
        if length > left:
            text, length = set_cell_size(text, left), left
        if text:  # one without cells is an accent of what stands before it
            segments.append(Segment(text, style))
            left -= length
    if left > 0:
        segments.append(Segment(" " * left, fill or Style.null()))
    return Strip(segments, max(width, 0))


def _shorten_segments(segments: list[Segment], text: str, style: Style, left: int) -> list[Segment]:
    """Return segments that end in "…" in the place of `text`, which is longer than `left`."""
    while segments and not segments[-1].cell_length:
        segments.pop()  # an accent cannot be shortened, and its letter goes
    if left or not segments:
        return [*segments, Segment(clip_text(text, left), style)] if left else segments
    *before, last = segments
    cut = set_cell_size(last.text, last.cell_length - 1) + "…"
    return [*before, Segment(cut, last.style)]


def clip_text(text: str, width: int) -> str:
    """Return `text` in exactly `width` cells: padded, or cut with "…" at the end."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + "…"[:width]


def align_right(text: str, width: int) -> str:
    """Return `text` at the right of `width` cells, cut where it is longer."""
    short = clip_text(text, width) if cell_len(text) > width else text
    return " " * (width - cell_len(short)) + short


def wrap_paragraph(text: str, width: int, style: Style) -> list[Strip]:
    """Return a text of several lines or sentences, wrapped at words."""
    room = max(width, 8)  # narrower columns of text cannot be read: cut there
    rows: list[str] = []
    for part in text.split("\n"):
        for row in textwrap.wrap(escape_unprintable(part), room) or [""]:
            # textwrap counts characters, and a wide one takes two cells
            rows += chop_cells(row, room) if cell_len(row) > room else [row]
    return [line([(row, style)], width, style) for row in rows]


def join_blocks(left: Sequence[Strip], right_part: Sequence[Strip], blank: Style) -> list[Strip]:
    """Return two blocks side by side; the shorter one is filled up with blanks."""
    height = max(len(left), len(right_part))
    blocks = []
    for block in (left, right_part):
        width = block[0].cell_length if block else 0
        empty = Strip([Segment(" " * width, blank)], width)
        blocks.append([*block, *[empty] * (height - len(block))])
    return [Strip.join(pair) for pair in zip(*blocks, strict=True)]


SEPARATOR = " · "


def header(parts: Sequence[tuple[str, str, int]], width: int, theme: Theme) -> Strip:
    """Return (text, style name, importance) parts as one line.

    While they do not fit, the least important one (the highest number) is left out.
    """
    kept = [part for part in parts if part[0]]
    while len(kept) > 1 and _length(kept) > width:
        kept.remove(max(kept, key=lambda part: part[2]))
    spans: list[Span] = []
    for text, style, _ in kept:
        if spans:
            spans.append((SEPARATOR, theme.style("muted")))
        spans.append((text, theme.style(style)))
    return line(spans, width, theme.style("text"))


def _length(parts: Sequence[tuple[str, str, int]]) -> int:
    return sum(cell_len(text) for text, _, _ in parts) + len(SEPARATOR) * (len(parts) - 1)
