"""The matrix of segments: which segment attends to which, and where that is not as declared."""

from __future__ import annotations

from functools import cache

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text
from flexinspect.drawing.token_cells import segment_style
from flexinspect.masks.viewport import (
    BOTH,
    LEAKED,
    LOST,
    N_STATES,
    UNKNOWN,
    PixelCounts,
)
from flexinspect.panels.mask.mask_data import MaskData, segment_number
from flexinspect.panels.mask.mask_pixels import EVEN, mask_palette
from flexinspect.panels.mask.mask_segments import (
    SegmentMatrix,
    format_open_share,
    format_pair_difference,
)
from flexinspect.panels.token_window import segment_color

_MIN_NAMED_WIDTH = 9
"""Columns of a cell from which its head has a name after the number."""

_SHORT_SHARES = {"open": "all", "closed": "·", "ahead": "ahd", "-": ""}
_WORDS_WIDTH = 7


def draw_matrix(data: MaskData, matrix: SegmentMatrix, pen: Pen) -> list[Strip]:
    """Draw the heads of the columns, then a line per segment of the rows."""
    pairs, cursor = matrix.pairs, _pair_of_cursor(data)
    strips = [pen.line(*_draw_heads(data, matrix, pen))]
    states = PixelCounts(
        np.where(pairs.open > 0, np.maximum(pairs.past, 1), pairs.past),
        *(pairs.open, pairs.lost, pairs.leaked),
    ).pixel_states()
    tables = (pairs.open, pairs.past, pairs.lost, pairs.leaked)
    counts = np.stack(tables, axis=-1).tolist()
    gap, width = Segment(" ", pen.style("text")), matrix.cell - 1
    for row, own_states, own_counts in zip(pairs.rows, states.tolist(), counts, strict=True):
        cells = [Segment(*_draw_row_head(data, row, matrix.head, row == cursor[0], pen))]
        for key, state, count in zip(pairs.keys, own_states, own_counts, strict=True):
            style = pen.style("muted")
            if state != UNKNOWN:
                style = _cell_style(state, (row, key) == cursor, pen.theme.no_color)
            cells += [Segment(_cell_text(width, *count).rjust(width), style), gap]
        strips.append(Strip(cells).adjust_cell_length(pen.width, gap.style))
    return strips


def _pair_of_cursor(data: MaskData) -> tuple[int, int]:
    """Return the segments of the cursor, (-1, -1) without a cursor."""
    if data.cursor is None:
        return -1, -1
    row, key = int(data.mask_view.positions[data.cursor[0]]), data.cursor[1]
    return segment_number(data.segments, row), segment_number(data.segments, key)


def _draw_heads(data: MaskData, matrix: SegmentMatrix, pen: Pen) -> list[NamedSpan]:
    corners = ("share of past keys open", "row ↓ key →", "")
    corner = next(text for text in corners if len(text) < matrix.head)
    spans: list[NamedSpan] = [(clip_text(corner, matrix.head), "muted")]
    for key in matrix.pairs.keys:
        width = matrix.cell - 1
        text = align_right(str(key), width)
        if matrix.cell >= _MIN_NAMED_WIDTH:
            text = align_right(f"{key} {escape_unprintable(data.segments[key].label)}", width)
        spans += [(text, _segment_style(data, key, pen)), (" ", "text")]
    return spans


def _draw_row_head(
    data: MaskData, row: int, width: int, is_cursor: bool, pen: Pen
) -> tuple[str, Style]:
    label = escape_unprintable(data.segments[row].label)
    number = align_right(str(row), len(str(len(data.segments) - 1)))
    text = clip_text(f"{number} {label}", width - 1) + ("▸" if is_cursor else " ")
    return text, _segment_style(data, row, pen) + Style(bold=is_cursor)


def _segment_style(data: MaskData, number: int, pen: Pen) -> Style:
    return segment_style(segment_color(number, data.segments), 0, pen.theme.no_color)


def _cell_text(width: int, n_open: int, n_past: int, n_lost: int, n_leaked: int) -> str:
    """Return the share of open keys, and the difference, as far as they fit into a width."""
    share = format_open_share(n_open, n_past)
    if width < _WORDS_WIDTH - 1:
        share = _SHORT_SHARES.get(share, f"{100 * n_open // max(n_past, 1)}%")
    difference = format_pair_difference(n_lost, n_leaked)
    if not difference:
        return share
    texts = (f"{share} {difference}", difference)
    return next((text for text in texts if len(text) <= width), "!")


@cache
def _cell_style(state: int, is_cursor: bool, no_color: bool) -> Style:
    if no_color:
        return Style(bold=state in (LOST, LEAKED, BOTH), reverse=is_cursor)
    emphasis = Style(bold=is_cursor, underline=is_cursor)
    return mask_palette().style(EVEN * N_STATES + state) + emphasis
