"""The mask panel drawn: the cells, words and segments along the axes, the cursor in words below."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from rich.cells import cell_len
from rich.segment import Segment as RichSegment
from textual.strip import Strip

from flexinspect.panels.parts.maskcells import grid_strips, mask_legend
from flexinspect.panels.parts.maskdata import MaskData
from flexinspect.panels.parts.masktokens import segment_color_at
from flexinspect.panels.parts.maskwords import (
    CellDescription,
    describe_cell,
    describe_first_pairs,
    format_counts,
    format_token,
)
from flexinspect.text import escape_unprintable
from flexinspect.widgets.lines import Span, align_right, clip_text, line
from flexinspect.widgets.look import Theme
from flexinspect.widgets.tokencells import TokenCell, token_style

NARROW_WIDTH = 72
"""Columns below which the note says layer, head and scale briefly."""


def draw_mask(data: MaskData, theme: Theme) -> list[Strip]:
    """Return at most `height` strips of exactly `width` cells, as the data's frame says."""
    layout = data.layout
    strips = [_draw_segment_header(data, theme)] * layout.header + _draw_token_header(data, theme)
    strips += _draw_grid_lines(data, theme)
    strips += _draw_footer(data, theme)[: layout.footer]
    return strips[: layout.height]


def _draw_grid_lines(data: MaskData, theme: Theme) -> list[Strip]:
    layout = data.layout
    blank = layout.width - layout.left - layout.columns
    end = Strip([RichSegment(" " * blank, theme.style("text"))] if blank > 0 else [])
    cells = grid_strips(data, theme)[: layout.lines]
    labels = [Strip(_draw_row_margin(data, number, theme)) for number in range(len(cells))]
    return [Strip.join([*parts, end]) for parts in zip(labels, cells, strict=True)]


# -- margins --------------------------------------------------------------------------------------


def _draw_row_margin(data: MaskData, number: int, theme: Theme) -> list[RichSegment]:
    """Return the left margin of a line: words or segments, and the mark of the current rows."""
    layout, mask_view = data.layout, data.mask_view
    if not layout.left:
        return []
    rows = _rows_of_line(data, number)
    width = layout.left - 1
    mark = _row_mark(data, rows, theme)
    first_line = layout.cell_width < 2 or number * 2 % layout.cell_width == 0
    if layout.grid.row_scale == 1 and width >= (6 if layout.cell_width > 1 else 10):
        positions = [int(mask_view.positions[row]) for row in rows]  # one or two of them
        spans = _draw_tokens_at(data, positions, width, theme) if first_line else None
        if spans is None:
            spans = [(" " * width, token_style(_blank_cell(data, positions[0]), theme))]
    else:
        spans = [_draw_segment_at(data, number, width, theme)]
    strip = line(spans, width, theme.style("text"))
    return [*strip, RichSegment(mark[0], mark[1])]


def _rows_of_line(data: MaskData, number: int) -> range:
    """Return the rows of the sheet that a line of the grid shows."""
    grid, enlarged = data.layout.grid, data.layout.cell_width
    start = grid.row + 2 * number // enlarged * grid.row_scale
    stop = grid.row + (-(-2 * (number + 1) // enlarged)) * grid.row_scale
    last = data.mask_view.n_rows
    return range(min(start, last - 1), max(min(stop, last), min(start, last - 1) + 1))


def _row_mark(data: MaskData, rows: range, theme: Theme) -> Span:
    if data.cursor is not None and data.cursor[0] in rows:
        return "▸", theme.style("chosen")
    current = data.current
    whole = current is not None and len(current) == data.mask_view.n_rows
    if (
        current is not None
        and not whole
        and rows.start < current.stop
        and current.start < rows.stop
    ):
        return "▶" if len(current) == 1 else "▌", theme.style("accent")
    return " ", theme.style("text")


def _blank_cell(data: MaskData, position: int) -> TokenCell:
    return TokenCell(2 * position, "", segment_color_at(data.segments, position))


def _draw_tokens_at(data: MaskData, positions: list[int], width: int, theme: Theme) -> list[Span]:
    """Return the words of one or two rows at the right of the margin, in their segments' bands."""
    words = [data.tokens.get(p, _blank_cell(data, p)) for p in positions]
    if len(words) == 1:
        room = [width]
    else:
        second = min(cell_len(words[1].text), max(width // 2, width - cell_len(words[0].text)))
        room = [width - second, second]
    spans: list[Span] = []
    for number, (word, cells) in enumerate(zip(words, room, strict=False)):
        text = align_right(word.text, cells) if number == 0 else clip_text(word.text, cells)
        spans.append((text, token_style(word, theme)))
    return spans


def _draw_segment_at(data: MaskData, number: int, width: int, theme: Theme) -> Span:
    """Return the label of a segment at the line where it begins, else its band."""
    position = _middle_position(data, number)
    style = token_style(_blank_cell(data, position), theme)
    about = data.segment(position)
    if about is None:
        return align_right(str(position), width), style
    if number == 0 or data.segment(_middle_position(data, number - 1)) is not about:
        return clip_text(_shorten_label(escape_unprintable(about.label), width), width), style
    text = str(position) if number % 8 == 4 and width >= 5 else ""
    return align_right(text, width), style


def _middle_position(data: MaskData, number: int) -> int:
    """Return the position of the row in the middle of a line."""
    rows = _rows_of_line(data, number)
    middle = int(data.mask_view.positions[rows[(len(rows) - 1) // 2]])
    if segment_color_at(data.segments, middle) < 0:  # a separator is not worth a label
        middle = int(data.mask_view.positions[rows[len(rows) // 2]])
    return middle


def _shorten_label(label: str, width: int) -> str:
    """Return a label that fits: "paraphrase 12" as "para 12", "p12" where there is no room."""
    if len(label) <= width:
        return label
    name, _, number = label.rpartition(" ")
    if not (name and number.isdigit()):
        return label
    room = width - len(number) - 1
    return f"{name[:room]} {number}" if room >= 3 else f"{name[:1]}{number}"


def _draw_segment_header(data: MaskData, theme: Theme) -> Strip:
    layout = data.layout
    grid = layout.grid
    keys = (grid.key + grid.key_scale * np.arange(grid.width)).tolist()
    spans: list[Span] = [(_corner_label(data), theme.style("muted"))] if layout.left else []
    for number, run in groupby(keys, key=lambda key: _segment_index(data, key)):
        own = list(run)
        width = len(own) * layout.cell_width
        label = escape_unprintable(data.segments[number].label) if number >= 0 else str(own[0])
        bar = "│" if theme.no_color else ""
        text = (
            clip_text(bar + _shorten_label(label, width - len(bar)), width)
            if width > 3
            else bar * 1
        )
        spans.append((text.ljust(width)[:width], token_style(_blank_cell(data, own[0]), theme)))
    return line(spans, layout.width, theme.style("text"))


def _segment_index(data: MaskData, key: int) -> int:
    about = data.segment(key)
    return -1 if about is None else data.segments.index(about)


def _corner_label(data: MaskData) -> str:
    return clip_text("row ↓ key →" if data.layout.left >= 11 else "", data.layout.left)


def _draw_token_header(data: MaskData, theme: Theme) -> list[Strip]:
    """Return the words of the keys: from top to bottom, or across where a cell is wide enough."""
    layout, mask_view = data.layout, data.mask_view
    if not layout.token_lines:
        return []
    keys = range(layout.grid.key, min(layout.grid.key_stop, mask_view.n_keys))
    words = [data.tokens.get(key, _blank_cell(data, key)) for key in keys]
    styles = [token_style(word, theme) for word in words]
    cells = [_vertical_text(word.text, layout.cell_width, layout.token_lines) for word in words]
    strips = []
    for number in range(layout.token_lines):
        spans: list[Span] = [(" " * layout.left, theme.style("text"))] if layout.left else []
        spans += [(cell[number], style) for cell, style in zip(cells, styles, strict=True)]
        strips.append(line(_merge_spans(spans), layout.width, theme.style("text")))
    return strips


def _vertical_text(text: str, width: int, lines: int) -> list[str]:
    """Return a word in `lines` lines of `width` cells."""
    if lines == 1 and width > 1:
        return [clip_text(text.strip(), width)]
    letters = [char for char in text.strip() or text if cell_len(char) > 0]
    shown = [char if cell_len(char) <= width else "□" for char in letters]
    if len(shown) > lines:
        shown = [*shown[: lines - 1], "…"]
    return [clip_text(char, width) for char in [" "] * (lines - len(shown)) + shown]


def _merge_spans(spans: list[Span]) -> list[Span]:
    return [
        ("".join(text for text, _ in run), style)
        for style, run in groupby(spans, key=lambda span: span[1])
    ]


# -- the foot -------------------------------------------------------------------------------------


def _draw_footer(data: MaskData, theme: Theme) -> list[Strip]:
    layout = data.layout
    words, counts = describe_cell(data), format_counts(data)
    text = theme.style("text")
    if words is None:
        first, rest = _footer_without_cursor(data, theme)
    elif cell_len(words.sentence()) <= layout.width:
        first, rest = [(words.sentence(), theme.style(words.style))], [(counts, text)]
    else:
        first = [(_shorten_description(data, words), theme.style(words.style))]
        rest = [(words.reason or counts, theme.style(words.style) if words.reason else text)]
    gap: list[Span] = [("  ", text)] if rest else []
    second = [*rest, *gap, *mask_legend(data, theme)]
    if layout.footer > 2 and layout.width < 2 * NARROW_WIDTH:
        return [
            line(spans, layout.width, text) for spans in (first, rest, mask_legend(data, theme))
        ]
    return [line(spans, layout.width, text) for spans in (first, second, [])]


def _footer_without_cursor(data: MaskData, theme: Theme) -> tuple[list[Span], list[Span]]:
    counts: list[Span] = [(format_counts(data), theme.style("text"))]
    if data.fallback_reason:
        return [(data.fallback_reason, theme.style("warn"))], counts
    pairs = describe_first_pairs(data)
    return ([(pairs[0], theme.style("bad"))], counts) if pairs else (counts, [])


def _shorten_description(data: MaskData, words: CellDescription) -> str:
    """Return who may look at whom, without the row's segment where it is too long with it."""
    whole = f"row {words.row} {words.relation} {words.key}"
    if cell_len(whole) <= data.layout.width or data.cursor is None:
        return whole
    may = words.relation.replace("may look at", "sees").replace("may not look at", "does not see")
    position = int(data.mask_view.positions[data.cursor[0]])
    return f"{format_token(data, position, segment=False)} {may} {words.key}"
