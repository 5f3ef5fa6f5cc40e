"""The state of single rows and columns of a mask: open, closed, or different from declared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexinspect.core.errors import FlexInspectError
from flexinspect.masks.counting import PositionGroups
from flexinspect.masks.mask_presets import declared_spec
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN, UNKNOWN, States
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.mask_grid import MaskLoader, MaskView
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments
from flexinspect.trace.queries import generation_in_branch


def load_mask_view(source: Source, place: TracePlace) -> MaskView | None:
    """Return the mask of a place, None if it has no recorded cells or cannot be read."""
    reader = source.reader
    try:
        row = generation_in_branch(reader, reader.generation(place.generation), place.branch)
        starts = sorted(segment.start for segment in load_segments(reader, place))
        groups = PositionGroups(tuple(starts) or (0,))
        view = MaskLoader(source, place, declared_spec(row.declared), groups).load()
    except FlexInspectError:
        return None  # the mask panel shows the reason
    return view if view is not None and view.n_keys and view.n_known() else None


def find_row(view: MaskView, pos: int) -> int | None:
    """Return the newest row of a position, None if no step had it as its input."""
    found = np.flatnonzero(view.positions == pos)
    return int(found[-1]) if len(found) else None


def find_center(view: MaskView, pos: int | None) -> tuple[int, int] | None:
    """Return the (row, key) of the first difference in the row of `pos`, or else in the mask.

    Without a difference it is cell (`pos`, `pos`), None where no step had `pos` as its input.
    """
    row = None if pos is None else find_row(view, pos)
    if row is not None:
        different = np.flatnonzero(np.isin(row_states(view, row), (LEAKED, LOST)))
        if len(different):
            return row, int(different[0])
    first = next(filter(None, map(view.first_cell, ("leaked", "lost"))), None)
    if first is not None or row is None or pos is None:
        return first
    return row, min(pos, view.n_keys - 1)


def row_states(view: MaskView, row: int) -> States:
    """Return the state of each key for a row, uint8 (keys,): see `flexinspect.masks.viewport`."""
    states: States = region_states(view, range(row, row + 1), slice(0, view.n_keys))[0]
    return states


def column_states(view: MaskView, key: int, rows: range) -> States:
    """Return the state of a key for some rows, uint8 (rows,)."""
    states: States = region_states(view, rows, slice(key, key + 1))[:, 0]
    return states


def region_states(view: MaskView, rows: range, keys: slice) -> States:
    """Return states, uint8 (rows, keys)."""
    states = np.full((len(rows), keys.stop - keys.start), CLOSED, np.uint8)
    for part in view.parts:
        start, stop = max(rows.start, part.row), min(rows.stop, part.stop)
        if start >= stop:
            continue
        own = slice(start - part.row, stop - part.row)
        packed = part.rows(view.source, view.head, own.start, own.stop)
        is_open = _unpack(packed, keys)
        found = np.where(is_open, np.uint8(OPEN), np.uint8(CLOSED))
        if view.spec is not None:
            lost, leaked = view.differing_rows(part, start, stop)
            found[_unpack(leaked, keys)] = LEAKED
            found[_unpack(lost, keys)] = LOST
        found[~part.known[own]] = UNKNOWN
        states[start - rows.start : stop - rows.start] = found
    return states


def _unpack(packed: npt.NDArray[np.uint8], keys: slice) -> npt.NDArray[np.bool_]:
    """Return some columns of packed rows; those behind their end are closed."""
    low = keys.start // 8
    bits = np.unpackbits(packed[:, low : -(-keys.stop // 8)], axis=1)
    bits = bits[:, keys.start - 8 * low : keys.stop - 8 * low]
    missing = keys.stop - keys.start - bits.shape[1]
    return np.pad(bits, ((0, 0), (0, missing))).astype(np.bool_)
