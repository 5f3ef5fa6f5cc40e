"""Windows of a sheet as states of pixels: what was executed, declared, received, or differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexinspect.masksheets import windows
from flexinspect.masksheets.counting import CHUNK_ROWS
from flexinspect.masksheets.windows import PixelCounts, PixelGrid, States
from flexinspect.panels.parts.maskblocks import BlockPart
from flexinspect.panels.parts.maskframe import MaskViewMode
from flexinspect.panels.parts.maskparts import MaskPart, MaskView, close_dropped_keys


def load_states(mask_view: MaskView, grid: PixelGrid, view: MaskViewMode) -> States:
    """Return a window of a view as states; kept, as it is the same at most steps."""
    serials = tuple(part.serial for part in mask_view.parts)
    key = ("mask.window", serials, mask_view.head, grid, view)
    states: States = mask_view.source.get_or_create(
        key,
        lambda: make_window(mask_view, grid, view).pixel_states(),
        lambda found: found.nbytes + 256,
    )
    return states


def make_window(mask_view: MaskView, grid: PixelGrid, view: MaskViewMode) -> PixelCounts:
    """Return a window of what was executed, of what was declared, or of how they differ."""
    known = [(0, mask_view.n_rows)]
    if view != "declared":
        known = [span for part in mask_view.parts for span in part.known_spans()]
    window = PixelCounts(windows.pixel_sizes(grid, known, mask_view.n_keys), grid.empty())
    if view == "declared":
        _add_declared_rows(mask_view, grid, window)
        return window
    if view == "difference":
        window = replace(window, lost=grid.empty(), leaked=grid.empty())
    for part in mask_view.parts:
        if part.row < grid.row_stop and part.stop > grid.row:
            _add_part(mask_view, part, grid, window)
    return window


def _add_declared_rows(mask_view: MaskView, grid: PixelGrid, window: PixelCounts) -> None:
    stop = min(grid.row_stop, mask_view.n_rows)
    for row in range(grid.row, stop, CHUNK_ROWS):
        packed = mask_view.declared(row, min(row + CHUNK_ROWS, stop), mask_view.n_keys)
        windows.fold_rows(packed, row, grid, window.open)


def _add_part(mask_view: MaskView, part: MaskPart, grid: PixelGrid, window: PixelCounts) -> None:
    if grid.in_tiles:
        for out, plane in (
            (window.open, part.counts.open),
            (window.lost, part.counts.lost),
            (window.leaked, part.counts.leaked),
        ):
            if out is not None:
                windows.fold_tiles(plane, part.row, grid, out)
        return
    start, stop = max(grid.row, part.row), min(grid.row_stop, part.stop)
    packed = part.rows(mask_view.source, mask_view.head, start - part.row, stop - part.row)
    windows.fold_rows(packed, start, grid, window.open)
    if window.lost is not None and window.leaked is not None:
        meant = mask_view.declared(start, stop, part.n_keys)
        close_dropped_keys(meant, part.steps, start - part.row)
        known = np.array([part.is_known(row) for row in range(start, stop)])
        meant[~known] = 0
        windows.fold_rows(meant & ~packed, start, grid, window.lost)
        windows.fold_rows(packed & ~meant, start, grid, window.leaked)


def load_table_states(mask_view: MaskView, blocks: Sequence[BlockPart], grid: PixelGrid) -> States:
    """Return what the block tables say of a window; dense masks are received as they are run."""
    serials = tuple(part.serial for part in mask_view.parts)
    key = ("mask.tables", serials, mask_view.head, grid)
    states: States = mask_view.source.get_or_create(
        key, lambda: _make_table_states(mask_view, blocks, grid), lambda found: found.nbytes + 256
    )
    return states


def _make_table_states(mask_view: MaskView, blocks: Sequence[BlockPart], grid: PixelGrid) -> States:
    spans: list[tuple[int, int]] = []
    partial, full = grid.empty(), PixelCounts(grid.empty(), grid.empty())
    for part, tables in zip(mask_view.parts, blocks, strict=True):
        if part.row >= grid.row_stop or part.stop <= grid.row:
            continue
        spans += tables.spans
        for one in tables.blocks:
            windows.fold_blocks(one, grid, partial, full.open)
        if tables.is_dense:
            spans += part.known_spans()
            _add_part(mask_view, part, grid, full)
    size = windows.pixel_sizes(grid, spans, mask_view.n_keys)
    return windows.block_states(partial, full.open, size)
