"""Windows of a sheet as states of pixels: what was executed, declared, received, or differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexinspect.masksheets import windows
from flexinspect.masksheets.counting import CHUNK_ROWS
from flexinspect.masksheets.windows import Grid, States, Window
from flexinspect.panels.parts.maskblocks import BlockPart
from flexinspect.panels.parts.maskframe import View
from flexinspect.panels.parts.maskparts import Part, Sheet, close_dropped


def load_states(sheet: Sheet, grid: Grid, view: View) -> States:
    """Return a window of a view as states; kept, as it is the same at most steps."""
    serials = tuple(part.serial for part in sheet.parts)
    key = ("mask.window", serials, sheet.head, grid, view)
    states: States = sheet.source.keep(
        key, lambda: window_of(sheet, grid, view).states(), lambda found: found.nbytes + 256
    )
    return states


def window_of(sheet: Sheet, grid: Grid, view: View) -> Window:
    """Return a window of what was executed, of what was declared, or of how they differ."""
    known = [(0, sheet.n_rows)]
    if view != "declared":
        known = [span for part in sheet.parts for span in part.known_spans()]
    window = Window(windows.sizes(grid, known, sheet.n_keys), grid.empty())
    if view == "declared":
        _add_declared(sheet, grid, window)
        return window
    if view == "difference":
        window = replace(window, lost=grid.empty(), leaked=grid.empty())
    for part in sheet.parts:
        if part.row < grid.row_stop and part.stop > grid.row:
            _add_part(sheet, part, grid, window)
    return window


def _add_declared(sheet: Sheet, grid: Grid, window: Window) -> None:
    stop = min(grid.row_stop, sheet.n_rows)
    for row in range(grid.row, stop, CHUNK_ROWS):
        packed = sheet.declared(row, min(row + CHUNK_ROWS, stop), sheet.n_keys)
        windows.fold_rows(packed, row, grid, window.open)


def _add_part(sheet: Sheet, part: Part, grid: Grid, window: Window) -> None:
    if grid.in_tiles:
        for out, plane in (
            (window.open, part.tally.open),
            (window.lost, part.tally.lost),
            (window.leaked, part.tally.leaked),
        ):
            if out is not None:
                windows.fold_tiles(plane, part.row, grid, out)
        return
    start, stop = max(grid.row, part.row), min(grid.row_stop, part.stop)
    packed = part.rows(sheet.source, sheet.head, start - part.row, stop - part.row)
    windows.fold_rows(packed, start, grid, window.open)
    if window.lost is not None and window.leaked is not None:
        meant = sheet.declared(start, stop, part.n_keys)
        close_dropped(meant, part.fed, start - part.row)
        known = np.array([part.is_known(row) for row in range(start, stop)])
        meant[~known] = 0
        windows.fold_rows(meant & ~packed, start, grid, window.lost)
        windows.fold_rows(packed & ~meant, start, grid, window.leaked)


def load_table_states(sheet: Sheet, blocks: Sequence[BlockPart], grid: Grid) -> States:
    """Return what the block tables say of a window; dense masks are received as they are run."""
    serials = tuple(part.serial for part in sheet.parts)
    key = ("mask.tables", serials, sheet.head, grid)
    states: States = sheet.source.keep(
        key, lambda: _make_table_states(sheet, blocks, grid), lambda found: found.nbytes + 256
    )
    return states


def _make_table_states(sheet: Sheet, blocks: Sequence[BlockPart], grid: Grid) -> States:
    spans: list[tuple[int, int]] = []
    partial, full = grid.empty(), Window(grid.empty(), grid.empty())
    for part, tables in zip(sheet.parts, blocks, strict=True):
        if part.row >= grid.row_stop or part.stop <= grid.row:
            continue
        spans += tables.spans
        for one in tables.blocks:
            windows.fold_blocks(one, grid, partial, full.open)
        if tables.dense:
            spans += part.known_spans()
            _add_part(sheet, part, grid, full)
    size = windows.sizes(grid, spans, sheet.n_keys)
    return windows.block_states(partial, full.open, size)
