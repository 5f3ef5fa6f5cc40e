"""Lines of styled text as strips: cut at cell widths, safe for any terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.text import escape_unprintable

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
