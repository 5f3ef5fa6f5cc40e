"""Lines of text as strips of terminal cells, and `Canvas`, the widget that shows strips."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from flexinspect.core.text import ensure_printable, escape_unprintable
from flexinspect.drawing.theme import Theme

S = TypeVar("S", bound=Style | str)

_MAX_CACHED = 4096
"""Lines that are cached, some megabytes."""


class Canvas(Widget):
    """Shows strips as they are.

    It overrides `render_lines`, which skips Textual's line filters and caches (they rebuild every
    segment and cost more than the picture). So borders and padding belong to its parent, and the
    code that makes the strips has to respect `NO_COLOR`.
    """

    ALLOW_SELECT = False
    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"

    strips: Sequence[Strip] = ()
    """The strips that are shown."""

    def show(self, strips: Sequence[Strip]) -> None:
        """Show these strips from the next repaint on, which draws only the lines that changed."""
        lines = enumerate(zip_longest(self.strips, strips))
        changed = [
            Region(0, y, self.size.width, 1)
            for y, (old, new) in lines
            if old is not new and old != new
        ]
        self.strips = strips
        if changed:
            self.refresh(*changed)

    def repaint(self) -> None:
        """Draw the strips again in the current size and colours; for subclasses."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region, cut and filled up to the widget's size."""
        width = self.size.width
        style = self.rich_style.without_color if self.app.no_color else self.rich_style
        strips = [
            strip if strip.cell_length == width else strip.adjust_cell_length(width, style)
            for strip in self.strips[crop.y : crop.bottom]
        ]
        if len(strips) < crop.height:
            strips += [Strip.blank(width, style)] * (crop.height - len(strips))
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips


Span = tuple[str, Style]
"""A piece of a line. Pass text of a model or a trace through `escape_unprintable` before its width
is measured; `line` escapes what is still unprintable."""


def line(spans: Iterable[Span], width: int, fill: Style | None = None) -> Strip:
    """Return the spans as a strip of exactly `width` cells, cut with "…" where they are longer.

    `fill` is the style of the cells after the text. A wide character that does not fit leaves a
    blank. Trailing blanks are cut without "…". The last lines are cached: from one step to the next
    most of them stay, and the compositor caches its work in the strip.
    """
    return _draw_line(tuple(spans), width, fill)


@lru_cache(_MAX_CACHED)
def _draw_line(spans: tuple[Span, ...], width: int, fill: Style | None) -> Strip:
    segments: list[Segment] = []
    left = max(width, 0)
    for text, style in spans:
        text = ensure_printable(text)
        length = cell_len(text)
        if length > left and text.strip():
            return Strip(_shorten_segments(segments, text, style, left), max(width, 0))
        if length > left:
            text, length = set_cell_size(text, left), left
        if text:  # text without cells is a combining mark of the span before it
            segments.append(Segment(text, style))
            left -= length
    if left > 0:
        segments.append(Segment(" " * left, fill or Style.null()))
    return Strip(segments, max(width, 0))


def _shorten_segments(segments: list[Segment], text: str, style: Style, left: int) -> list[Segment]:
    """Append the beginning of `text`, which is longer than the `left` cells, with "…"."""
    while segments and not segments[-1].cell_length:
        segments.pop()  # a combining mark cannot be shortened, and its letter is cut
    if left or not segments:
        return [*segments, Segment(clip_text(text, left), style)] if left else segments
    *before, last = segments
    return [*before, Segment(set_cell_size(last.text, last.cell_length - 1) + "…", last.style)]


_joined: dict[tuple[int, ...], tuple[tuple[Strip, ...], Strip]] = {}
"""By the ids of strips, which are kept with them, the strip that they were joined to."""


def join_strips(*strips: Strip) -> Strip:
    """Join strips side by side; the same strips give the same one, as long as it is cached."""
    key = tuple(map(id, strips))
    known = _joined.get(key)
    if known is None:
        if len(_joined) >= _MAX_CACHED:
            _joined.clear()
        known = _joined[key] = strips, Strip.join(strips)
    return known[1]


def merge_spans(spans: Iterable[tuple[str, S]]) -> list[tuple[str, S]]:
    """Join neighbouring spans of the same style."""
    return [
        ("".join(text for text, _ in run), style)
        for style, run in groupby(spans, key=lambda span: span[1])
    ]


def clip_text(text: str, width: int) -> str:
    """Return `text` in exactly `width` cells: padded, or cut with "…" at the end."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + "…"[:width]


def align_right(text: str, width: int) -> str:
    """Right-align `text` in `width` cells; longer text is cut with "…"."""
    short = clip_text(text, width) if cell_len(text) > width else text
    return " " * (width - cell_len(short)) + short


def wrap_paragraph(text: str, width: int, style: Style) -> list[Strip]:
    """Wrap a text of one or more lines at words, in strips of `width` cells."""
    room = max(width, 8)  # narrower columns of text are unreadable: their lines are cut instead
    rows: list[str] = []
    for part in text.split("\n"):
        for row in textwrap.wrap(escape_unprintable(part), room) or [""]:
            # textwrap counts characters, and a wide one takes two cells
            rows += chop_cells(row, room) if cell_len(row) > room else [row]
    return [line([(row, style)], width, style) for row in rows]


NamedSpan = tuple[str, Style | str]
"""A `Span` whose style may be the name of a style of the theme."""


class Pen(Struct, frozen=True):
    """Draws lines of `width` cells in the styles of a theme; "text" fills them up."""

    theme: Theme
    width: int

    def resize(self, width: int) -> Pen:
        """Return a pen for lines of another width."""
        return replace(self, width=width)

    def style(self, name: Style | str) -> Style:
        """Return a style of the theme by its name; a style itself is returned as it is."""
        return self.theme.style(name) if isinstance(name, str) else name

    def line(self, *spans: NamedSpan) -> Strip:
        """Return the spans as one strip; see `line`."""
        named = ((text, self.style(name)) for text, name in spans)
        return line(named, self.width, self.style("text"))

    def paragraph(self, text: str, style: str = "text") -> list[Strip]:
        """Wrap a text at words; see `wrap_paragraph`."""
        return wrap_paragraph(text, self.width, self.style(style))

    def paragraphs(self, texts: Iterable[tuple[str, str]]) -> list[Strip]:
        """Wrap texts, each with the name of its style, one below the other."""
        return [strip for text, style in texts for strip in self.paragraph(text, style)]


def join_blocks(
    left: Sequence[Strip], right: Sequence[Strip], blank: Style, *, gap: int = 0
) -> list[Strip]:
    """Join two blocks, `gap` columns apart; the shorter one is filled up with blank lines."""
    height = max(len(left), len(right))
    blocks = []
    for block, space in ((left, gap), (right, 0)):
        width = (block[0].cell_length if block else 0) + space
        rows = [strip.adjust_cell_length(width, blank) for strip in block]
        blocks.append([*rows, *[Strip.blank(width, blank)] * (height - len(block))])
    return [join_strips(*pair) for pair in zip(*blocks, strict=True)]


def visible(at: int, room: int, total: int) -> slice:
    """Return the visible items of `total`: at most `room`, with item `at` near the middle."""
    first = max(0, min(at - room // 2, total - room))
    return slice(first, first + max(room, 0))


SEPARATOR = " · "


def header(parts: Sequence[tuple[str, str, int]], width: int, theme: Theme) -> Strip:
    """Join (text, style name, rank) parts to one line.

    While they do not fit, the least important part (the one with the highest rank) is dropped.
    """
    shown = [part for part in parts if part[0]]
    while len(shown) > 1 and cell_len(SEPARATOR.join(text for text, _, _ in shown)) > width:
        shown.remove(max(shown, key=lambda part: part[2]))
    spans = [span for text, style, _ in shown for span in ((SEPARATOR, "muted"), (text, style))]
    return Pen(theme, width).line(*spans[1:])
