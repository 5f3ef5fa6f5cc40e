"""Two masks of the same places compared: the cells around the first that differs."""

from __future__ import annotations

import numpy as np

from flexinspect.drawing.text_lines import visible
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN, UNKNOWN, States
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.cell_states import load_mask_view, region_states
from flexinspect.panels.mask.cells_around import N_KEYS, N_ROWS, CellsAround
from flexinspect.panels.mask.mask_grid import MaskView
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments, load_token_cells

MAX_COMPARED_ROWS = 2048
"""Newest rows that are compared; older ones of a longer sequence are left out."""


def load_mask_pair(
    one: tuple[Source, TracePlace],
    other: tuple[Source, TracePlace],
    *,
    size: tuple[int, int] = (N_ROWS, N_KEYS),
) -> tuple[CellsAround, int, int] | None:
    """Return the cells around the first difference, and how many are open in one or other only.

    `size` are the rows and keys of the picture.

    In the picture `LOST` cells are open in `one` only, `LEAKED` ones in `other` only. Without a
    difference the cells are those of the newest row. None if a side has no recorded cells.
    """
    views = [load_mask_view(*side) for side in (one, other)]
    left, right = views
    if left is None or right is None:
        return None
    n_rows = min(_stop_row(left, one[1]), _stop_row(right, other[1]))
    n_keys = min(left.n_keys, right.n_keys)
    first = max(n_rows - MAX_COMPARED_ROWS, 0)
    rows = range(first, n_rows)
    states = _pair_states(*(region_states(view, rows, slice(0, n_keys)) for view in (left, right)))
    places = np.argwhere(np.isin(states, (LOST, LEAKED)))
    center = places[0].tolist() if len(places) else [len(rows) - 1, n_keys - 1]
    row_slice, key_slice = (
        visible(at, room, total) for at, room, total in zip(center, size, states.shape, strict=True)
    )
    positions = left.positions[rows.start : rows.stop][row_slice].tolist()
    keys = range(n_keys)[key_slice]
    source, place = one
    segments = load_segments(source.reader, place)
    tokens = load_token_cells(source, place, segments, {*positions, *keys})
    words = {at: cell.text.strip() or cell.text for at, cell in tokens.items()}
    cells = CellsAround(
        tuple(words.get(at, str(at)) for at in positions),
        tuple(words.get(at, str(at)) for at in keys),
        tuple(map(tuple, states[row_slice, key_slice].tolist())),
    )
    return cells, int((states == LOST).sum()), int((states == LEAKED).sum())


def _stop_row(view: MaskView, place: TracePlace) -> int:
    """Return the row after the newest one of the place's step."""
    rows = view.rows_of_step(place.step)
    return rows.stop if rows is not None else view.n_rows


def _pair_states(one: States, other: States) -> States:
    is_open = [np.isin(states, (OPEN, LEAKED)) for states in (one, other)]
    found = np.where(is_open[0] & is_open[1], np.uint8(OPEN), np.uint8(CLOSED))
    found[is_open[0] & ~is_open[1]] = LOST
    found[~is_open[0] & is_open[1]] = LEAKED
    found[(one == UNKNOWN) | (other == UNKNOWN)] = UNKNOWN
    states: States = found
    return states
