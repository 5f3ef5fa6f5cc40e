"""The cells of a mask counted by pair of segments, and the matrix that shows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from rich.cells import cell_len

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import visible
from flexinspect.masks.counting import Counts
from flexinspect.panels.mask.mask_grid import MaskView
from flexinspect.records.prompt import Segment

MIN_CELL_WIDTH, MAX_CELL_WIDTH = 4, 14
"""Columns of a pair in the matrix."""


class SegmentPairs(Struct, frozen=True):
    """The cells of pairs of segments (of the row, of the key), int64 (rows, keys).

    `past` counts the cells that a causal mask opens.
    """

    rows: range
    keys: range
    open: Counts
    past: Counts
    lost: Counts
    leaked: Counts


def count_pairs(mask_view: MaskView, rows: range, keys: range) -> SegmentPairs:
    """Return the counts of the segments `rows` with the segments `keys`."""
    window = np.s_[rows.start : rows.stop, keys.start : keys.stop]
    empty = np.zeros((len(rows), len(keys)), np.int64)

    def total(kind: str) -> Counts:
        tables = (getattr(part.counts, kind) for part in mask_view.parts)
        return sum((table[window] for table in tables if table is not None), start=empty)

    past = _past_counts(mask_view, rows, keys)
    counts = map(total, ("lost_groups", "leaked_groups"))
    return SegmentPairs(rows, keys, total("group_counts"), past, *counts)


def _past_counts(mask_view: MaskView, rows: range, keys: range) -> Counts:
    """Return the number of cells that a causal mask opens, int64 (row segments, key segments)."""
    starts = np.array(mask_view.groups.starts)
    sizes = np.maximum(np.append(starts[1:], mask_view.n_keys) - starts, 0)
    known = np.concatenate([part.positions[part.known] for part in mask_view.parts])
    of_row = mask_view.groups.group_of(known)
    own = np.bincount(of_row, np.maximum(known + 1 - starts[of_row], 0), len(starts))
    n_rows = np.bincount(of_row, minlength=len(starts))
    row, key = np.array(rows)[:, None], np.array(keys)[None]
    earlier = np.where(key < row, n_rows[row] * sizes[key], 0)
    return np.where(key == row, own[row].astype(np.int64), earlier)


def format_open_share(n_open: int, n_past: int) -> str:
    """Return the share of open past keys: "open", "0.94", "closed", "ahead" or "-" (none)."""
    if n_open > n_past:
        return "ahead"
    if n_past == 0:
        return "-"
    if n_open in (0, n_past):
        return "open" if n_open else "closed"
    return f"{min(max(n_open / n_past, 0.01), 0.99):.2f}"


def format_pair_difference(n_lost: int, n_leaked: int) -> str:
    """Return "-53", "+31" or "-1+4": the lost and the leaked cells, "" without a difference."""
    signs = (("-", n_lost), ("+", n_leaked))
    return "".join(f"{sign}{_format_count(n)}" for sign, n in signs if n)


def _format_count(n: int) -> str:
    return str(n) if n < 10_000 else f"{n // 1000}k"


class SegmentMatrix(Struct, frozen=True):
    """The visible part of the matrix of segments.

    Its row heads are `head` columns wide, its cells `cell` columns.
    """

    head: int
    cell: int
    pairs: SegmentPairs

    def pair_at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the segments of the row and of the key at a cell; line 0 has the column heads."""
        row, key = y - 1, (x - self.head) // self.cell
        rows, keys = self.pairs.rows, self.pairs.keys
        if not (0 <= row < len(rows) and 0 <= key < len(keys)):
            return None
        return rows[row], keys[key]


def load_matrix(
    mask_view: MaskView,
    segments: Sequence[Segment],
    size: tuple[int, int],
    focus: tuple[int, int],
) -> SegmentMatrix:
    """Count the pairs of segments that fit into `size` (columns, lines) around those of `focus`."""
    width, lines = size
    longest = max(cell_len(escape_unprintable(segment.label)) for segment in segments)
    head = min(longest + 2 + len(str(len(segments))), max(width // 3, 4))
    room = max(width - head, 1)
    cell = min(max(room // len(segments), MIN_CELL_WIDTH), MAX_CELL_WIDTH, room)
    shown = [
        range(len(segments))[visible(at, most, len(segments))]
        for at, most in zip(focus, (max(lines - 1, 1), room // cell), strict=True)
    ]
    return SegmentMatrix(head, cell, count_pairs(mask_view, *shown))
