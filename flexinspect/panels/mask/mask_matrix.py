"""The matrix of segments: which segment attends to which, and where that is not as declared."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text
from flexinspect.masks.viewport import (
    BOTH,
    CLOSED,
    LEAKED,
    LOST,
    N_STATES,
    UNKNOWN,
    share_states,
)
from flexinspect.panels.mask.mask_data import MaskData, segment_number
from flexinspect.panels.mask.mask_pixels import EVEN, mask_palette
from flexinspect.panels.mask.mask_segments import (
    SegmentMatrix,
    format_open_share,
    format_pair_difference,
)

_MIN_NAMED_WIDTH = 9
"""Columns of a cell from which its head has a name after the number."""

_SHORT_SHARES = {"open": "all", "closed": "·", "ahead": "ahd", "-": ""}
_WORDS_WIDTH = 7


def draw_matrix(data: MaskData, matrix: SegmentMatrix, pen: Pen) -> list[Strip]:
    """Draw the heads of the columns, then a line per segment of the rows."""
    pairs, focus = matrix.pairs, _focus_pair(data)
    strips = [pen.line(*_draw_heads(data, matrix, focus))]
    states = share_states(pairs.open, np.minimum(pairs.past, np.maximum(pairs.open, pairs.past)))
    states[pairs.past == 0] = UNKNOWN
    states[pairs.lost > 0] = LOST
    states[pairs.leaked > 0] = LEAKED
    states[(pairs.lost > 0) & (pairs.leaked > 0)] = BOTH
    counts = (pairs.open, pairs.past, pairs.lost, pairs.leaked)
    for at, row in enumerate(pairs.rows):
        texts = [
            _cell_text(matrix.cell - 1, *(int(table[at, key]) for table in counts))
            for key in range(len(pairs.keys))
        ]
        is_focus = focus is not None and focus[0] == row
        cells: list[NamedSpan] = [_draw_row_head(data, row, matrix.head, is_focus, pen)]
        for key, text, state in zip(pairs.keys, texts, states[at].tolist(), strict=True):
            style = _cell_style(state, pen)
            if is_focus and focus is not None and focus[1] == key:
                style += Style(underline=True, bold=True)
            cells += [(align_right(text, matrix.cell - 1), style), (" ", "text")]
        strips.append(pen.line(*cells))
    return strips


def _focus_pair(data: MaskData) -> tuple[int, int] | None:
    """Return the segments of the cursor, None without a cursor."""
    if data.cursor is None:
        return None
    row, key = int(data.mask_view.positions[data.cursor[0]]), data.cursor[1]
    return segment_number(data.segments, row), segment_number(data.segments, key)


def _draw_heads(
    data: MaskData, matrix: SegmentMatrix, focus: tuple[int, int] | None
) -> list[NamedSpan]:
    corners = ("share of past keys open", "row ↓ key →", "")
    corner = next(text for text in corners if len(text) < matrix.head)
    spans: list[NamedSpan] = [(clip_text(corner, matrix.head), "muted")]
    for key in matrix.pairs.keys:
        width = matrix.cell - 1
        text = align_right(str(key), width)
        if matrix.cell >= _MIN_NAMED_WIDTH:
            text = align_right(f"{key} {escape_unprintable(data.segments[key].label)}", width)
        is_focus = focus is not None and focus[1] == key
        spans += [(text, "chosen" if is_focus else "strong"), (" ", "text")]
    return spans


def _draw_row_head(data: MaskData, row: int, width: int, is_focus: bool, pen: Pen) -> NamedSpan:
    label = escape_unprintable(data.segments[row].label)
    number = align_right(str(row), len(str(len(data.segments) - 1)))
    text = clip_text(f"{number} {label}", width - 1) + ("▸" if is_focus else " ")
    return text, "chosen" if is_focus else "text"


def _cell_text(width: int, n_open: int, n_past: int, n_lost: int, n_leaked: int) -> str:
    """Return the share of open keys, and the difference, as far as they fit into a width."""
    share = format_open_share(n_open, n_past)
    if width < _WORDS_WIDTH - 1:
        share = _SHORT_SHARES.get(share, f"{100 * n_open // max(n_past, 1)}%")
    difference = format_pair_difference(n_lost, n_leaked)
    if not difference:
        return share
    texts = (f"{share} {difference}", difference, "!" + difference[0], "!")
    return next((text for text in texts if cell_len(text) <= width), "!")


def _cell_style(state: int, pen: Pen) -> Style:
    if state == UNKNOWN:
        return pen.style("muted")
    if pen.theme.no_color:
        return pen.style("bad" if state in (LOST, LEAKED, BOTH) else "text")
    rgb = mask_palette().rgb[EVEN * N_STATES + state]
    luminance = sum(part * share for part, share in zip(rgb, (0.299, 0.587, 0.114), strict=True))
    ink = "#000000" if luminance > 110 else "#ffffff"
    return Style(color=Color.parse(ink), bgcolor=Color.from_rgb(*rgb), bold=state > CLOSED)
