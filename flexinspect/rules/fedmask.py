"""The borders that an executed mask has, compared with those of the declared segments.

A row that goes on with the segment of the row before sees one key more, itself. Every other row is
a border of the mask: a segment begins there, or sees nothing, or sees all. Masks without segments
(a causal one, a window, one that is open everywhere) have no borders, or one in many rows, and
nothing is concluded from the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flexinspect.masks import BoolArray, MaskSpec
from flexinspect.prompts import Segment
from flexinspect.records import MaskRecord
from flexinspect.rules.fedshift import MAX_SHIFT, is_growing

OpenKeyCounts = npt.NDArray[np.intp]
"""Open keys per row, (rows,)."""

Borders = tuple[int, ...]
"""Positions at which the rows of a mask begin to see something else."""

MAX_BORDER_ROWS = 4096
"""Rows up to which the borders of a declared rule are worked out."""


@dataclass(frozen=True, slots=True)
class HeadBorders:
    """The borders of some heads of a mask, `heads` being empty where all share them."""

    heads: tuple[int, ...]
    borders: Borders


def find_borders(mask: MaskRecord) -> tuple[HeadBorders, ...] | None:
    """Return the borders of a mask of several rows, None where it has none to speak of.

    That is a mask whose cells are not known, a single row that is broadcast, and a window.
    """
    cells = mask.cells
    if cells is None or mask.kv_offset or cells.shape[1] != mask.q_len or mask.q_len < 2:
        return None
    if mask.kind.startswith("none"):
        return None
    if mask.averaged is not None:  # rows that were meant to be closed
        cells = cells & ~mask.averaged[..., None]
    by_head: dict[Borders, list[int]] = {}
    for head, rows in enumerate(cells):
        counts = np.count_nonzero(rows, axis=1)
        if _has_sliding_rows(rows, counts, mask.q_offset):
            return None
        by_head.setdefault(_find_row_borders(counts, mask.q_offset), []).append(head)
    if len(by_head) == 1:
        return (HeadBorders((), next(iter(by_head))),)
    return tuple(HeadBorders(tuple(heads), borders) for borders, heads in by_head.items())


def _has_sliding_rows(cells: BoolArray, counts: OpenKeyCounts, offset: int) -> bool:
    """Say whether a row has as many keys as the one before and sees it: a window, or all is open.

    Where a segment begins, the row before is not seen.
    """
    rows = np.flatnonzero((counts[1:] == counts[:-1]) & (counts[1:] > 1)) + 1
    before = rows + offset - 1
    return bool(cells[rows, np.minimum(before, cells.shape[1] - 1)].any())


def _find_row_borders(counts: OpenKeyCounts, offset: int) -> Borders:
    """Return where the number of open keys per row, (rows,), does not rise by one."""
    steps = np.diff(counts)
    begun = np.maximum.accumulate(counts)[:-1] > 0
    goes_on = (steps == 1) & ((counts[:-1] > 0) | ~begun)
    stays_empty = (counts[1:] == 0) & (counts[:-1] == 0)
    return tuple((np.flatnonzero(~(goes_on | stays_empty)) + 1 + offset).tolist())


def spec_borders(spec: MaskSpec, n_rows: int) -> Borders:
    """Return the borders of a declared rule over the first rows."""
    counts = np.count_nonzero(spec.dense(min(n_rows, MAX_BORDER_ROWS)), axis=1)
    return _find_row_borders(counts, 0)


@dataclass(frozen=True, slots=True)
class BorderComparison:
    """What borders are against the declared segments.

    `offsets` says by how many tokens the borders lie before those declared (negative: after), all
    the same or growing; it is empty when they do not correspond. `missing` are the segments, of
    those that begin inside the mask's rows, at whose beginning there is no border.
    """

    offsets: tuple[int, ...] = ()
    misplaced: tuple[int, ...] = ()
    missing: tuple[Segment, ...] = field(default=())


def compare_borders(
    borders: Borders,
    segments: Sequence[Segment],
    apart: Sequence[Segment],
    extra_shifts: Iterable[int],
) -> BorderComparison:
    """Compare the borders of a mask with those of all segments, of which `apart` are kept apart.

    A border between two segments, in a separator, or at its ends, is in its place. `also` are
    numbers of tokens to try beside the near ones.
    """
    cut = tuple(b for b in borders if any(one.start < b < one.stop for one in apart))
    if not cut:
        return BorderComparison(missing=tuple(_find_missing_borders(borders, apart, 0)))
    tries = sorted(
        {*range(-MAX_SHIFT, MAX_SHIFT + 1), *extra_shifts} - {0}, key=lambda n: (abs(n), n < 0)
    )
    places = {edge for one in segments for edge in (one.start, one.stop)}
    for n in tries:
        fits = all(b + n in places for b in borders) and _is_regular_border_set(
            {b + n for b in borders}, apart
        )
        if (
            fits
            and not _find_missing_borders(borders, apart, n)
            and (len(borders) > 1 or abs(n) <= 4)
        ):
            return BorderComparison((n,) * len(borders), cut)
    return BorderComparison(_find_drift(borders, apart), cut)


def _find_missing_borders(borders: Borders, apart: Sequence[Segment], n: int) -> list[Segment]:
    """Return the segments with no border between their start and the stop of the one before."""
    return [
        later
        for earlier, later in pairwise(apart)
        if not any(earlier.stop - n <= b <= later.start - n for b in borders)
    ]


def _is_regular_border_set(borders: set[int], apart: Sequence[Segment]) -> bool:
    """Say whether gaps are all treated alike: before, after, or on both sides there is a border."""
    sides = {
        (earlier.stop in borders, later.start in borders)
        for earlier, later in pairwise(apart)
        if earlier.stop < later.start
    }
    return len(sides) < 2


def _find_drift(borders: Borders, apart: Sequence[Segment]) -> tuple[int, ...]:
    """Return growing offsets when the borders are those declared, in order, off by a few more."""
    starts = [one.start for one in apart[1:]]
    both = sorted({edge for one in apart for edge in (one.start, one.stop)} - {apart[0].start})
    for places in (starts, [*starts, apart[-1].stop], both):
        if len(places) != len(borders) or len(places) < 2:
            continue
        offsets = [place - b for place, b in zip(places, borders, strict=True)]
        n_off = sum(offset != 0 for offset in offsets)
        if is_growing(offsets) and n_off > 1 and max(map(abs, offsets)) <= MAX_SHIFT:
            return tuple(offsets)
    return ()
