"""Lines of styled text as strips: cut at cell widths, safe for any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.text import visible

Span = tuple[str, Style]
"""A piece of a line. Its text must be printable: pass what came from a model through `visible`."""


def line(spans: Iterable[Span], width: int, fill: Style | None = None) -> Strip:
    """Return the spans as a strip of exactly `width` cells, cut with "…" where they are longer.

    `fill` is the style of the cells behind the text. A wide character that does not fit whole
    leaves a blank.
    """
    segments: list[Segment] = []
    left = width
    for text, style in spans:
        if left <= 0:
            break
        length = cell_len(text)
        if length > left:
            segments.append(Segment(clipped(text, left), style))
            left = 0
            break
        segments.append(Segment(text, style))
        left -= length
    if left > 0:
        segments.append(Segment(" " * left, fill or Style.null()))
    return Strip(segments, max(width, 0))


def clipped(text: str, width: int) -> str:
    """Return `text` in exactly `width` cells: padded, or cut with "…" at the end."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + "…"[:width]


def right(text: str, width: int) -> str:
    """Return `text` at the right of `width` cells, cut where it is longer."""
    short = clipped(text, width) if cell_len(text) > width else text
    return " " * (width - cell_len(short)) + short


def paragraph(text: str, width: int, style: Style) -> list[Strip]:
    """Return a text of several lines or sentences, wrapped at words."""
    import textwrap

    rows: list[str] = []
    for part in text.split("\n"):
        rows += textwrap.wrap(visible(part), max(width, 8)) or [""]
    return [line([(row, style)], width, style) for row in rows]


def stacked(parts: Sequence[Sequence[Strip]]) -> list[Strip]:
    """Return blocks of strips one below the other."""
    return [strip for part in parts for strip in part]


def beside(left: Sequence[Strip], right_part: Sequence[Strip], blank: Style) -> list[Strip]:
    """Return two blocks side by side; the shorter one is filled up with blanks."""
    height = max(len(left), len(right_part))
    blocks = []
    for block in (left, right_part):
        width = block[0].cell_length if block else 0
        empty = Strip([Segment(" " * width, blank)], width)
        blocks.append([*block, *[empty] * (height - len(block))])
    return [Strip.join(pair) for pair in zip(*blocks, strict=True)]
