"""The data of the mask panel: the mask view, the pixels of the visible window, and its tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.drawing.token_cells import TokenCell
from flexinspect.masks import viewport
from flexinspect.masks.attention_row import UNCHECKED, LseCheck, recorded_check
from flexinspect.masks.counting import CHUNK_ROWS, PositionGroups
from flexinspect.masks.mask_presets import declared_spec
from flexinspect.masks.viewport import PixelCounts, PixelGrid, States
from flexinspect.panels.base import Missing, Request, TracePlace, import_hint
from flexinspect.panels.mask.mask_grid import (
    BlockPart,
    MaskLoader,
    MaskPart,
    MaskView,
    load_blocks,
)
from flexinspect.panels.mask.mask_layout import (
    MaskLayout,
    MaskOptions,
    MaskViewMode,
    mask_layout,
)
from flexinspect.panels.mask.mask_segments import SegmentMatrix, load_matrix
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import no_steps
from flexinspect.panels.token_window import load_segments, load_token_cells, segment_color
from flexinspect.records.prompt import Segment
from flexinspect.records.step import MaskRecord
from flexinspect.trace.queries import branch_of_step, generation_in_branch, n_generations
from flexinspect.trace.query_results import GenerationRow

MAX_LISTED_ROWS = 8
"""Maximum number of empty rows that are listed with their tokens."""


class MaskData(Struct, frozen=True):
    """A window of a mask view, ready to be drawn and described.

    `states` are the pixels of the layout's grid (see `flexinspect.masks.viewport`), `tables` the
    same for the block tables, `strip_states` and `map_states` those of the step's newest row and of
    the map, `matrix` the pairs of segments; all of them are None if they are not shown. `current`
    are the rows of the place's step, `cursor` is (row, key). `tokens` has the tokens that are
    named, by position. `mask` is the mask of the cursor's row, or of the current step.
    `fallback_reason` says why another view than the requested one is shown, "" if it is the
    requested one. `lse_check` is that of the step's newest row.
    """

    place: TracePlace
    generation_row: GenerationRow
    mask_view: MaskView
    segments: tuple[Segment, ...]
    layout: MaskLayout
    view_mode: MaskViewMode
    states: States
    tables: States | None
    strip_states: States | None
    map_states: States | None
    matrix: SegmentMatrix | None
    blocks: tuple[BlockPart, ...]
    current: range | None
    cursor: tuple[int, int] | None
    tokens: dict[int, TokenCell]
    lse_check: LseCheck
    mask: MaskRecord | None
    empty_rows: npt.NDArray[np.intp]
    fallback_reason: str = ""

    @property
    def focus_row(self) -> int | None:
        """The cursor's row, or the newest one of the current step; None if that is not shown."""
        if self.cursor is not None:
            return self.cursor[0]
        return self.current[-1] if self.current else None

    def segment(self, position: int) -> Segment | None:
        """Return the segment of a position."""
        number = segment_number(self.segments, position)
        return self.segments[number] if number >= 0 else None

    def block_part(self, row: int) -> BlockPart | None:
        """Return the block tables of the part that holds a row."""
        parts = zip(self.mask_view.parts, self.blocks, strict=False)
        return next((blocks for part, blocks in parts if row < part.stop), None)


def load_mask(source: Source, request: Request[MaskOptions]) -> MaskData:
    """Read the mask at a place. Raises `Missing` if it has none, and `TraceError`."""
    place, reader = request.place, source.reader
    if place.generation >= n_generations(reader):
        raise no_steps(reader)
    row = generation_in_branch(reader, reader.generation(place.generation), place.branch)
    segments = tuple(sorted(load_segments(reader, place), key=lambda segment: segment.start))
    owner = branch_of_step(reader, place.generation, place.step, place.branch)
    # The call of the place's layer, of the first layer if it has none.
    calls = sorted(
        reader.calls(place.generation, place.step, owner),
        key=lambda call: call.layer != place.layer,
    )
    check = UNCHECKED
    if calls:
        place, check = replace(place, layer=calls[0].layer), recorded_check(calls[0])
    groups = PositionGroups(tuple(segment.start for segment in segments) or (0,))
    mask_view = MaskLoader(source, place, declared_spec(row.declared), groups).load()
    if mask_view is None or not mask_view.n_keys:
        raise Missing("No step of this generation has processed a token yet.")
    data = _make_mask_data(request, place, row, mask_view, segments, check)
    positions = _named_positions(data)
    return replace(data, tokens=load_token_cells(source, place, segments, positions))


def _make_mask_data(
    request: Request[MaskOptions],
    place: TracePlace,
    row: GenerationRow,
    mask_view: MaskView,
    segments: tuple[Segment, ...],
    check: LseCheck,
) -> MaskData:
    source, options = mask_view.source, request.options
    current = mask_view.rows_of_step(place.step)
    cursor = _find_cursor(mask_view, options, place)
    view, fallback_reason = _choose_view_mode(mask_view, options.view)
    newest = current[-1] if current else mask_view.n_rows - 1
    focus = cursor or (newest, min(int(mask_view.positions[newest]), mask_view.n_keys - 1))
    shape = (mask_view.n_rows, mask_view.n_keys)
    layout = mask_layout(
        request.width,
        request.height,
        shape,
        focus,
        options,
        centred=cursor is not None,
        step_row=current[-1] if current else None,
        n_segments=len(segments),
    )
    blocks: tuple[BlockPart, ...] = ()
    with_tables = options.blocks or view == "received"
    if with_tables or mask_view.count("lost") or mask_view.count("leaked"):
        blocks = tuple(load_blocks(source, part, mask_view.head) for part in mask_view.parts)
    states = partial(load_states, mask_view, blocks)
    matrix = None
    if layout.matrix:
        first = mask_view.first_cell("leaked") or mask_view.first_cell("lost")
        at = cursor or (first if view == "difference" and first else focus)
        matrix = _load_matrix_at(mask_view, segments, layout, at)
    name = mask_view.part_of(focus[0]).step_at(focus[0]).mask
    read = partial(source.reader.mask_summary, name or "")
    mask = None if name is None else source.get_or_create(("mask.summary", name), read)
    is_empty = [(part.counts.open.row_counts == 0) & part.known for part in mask_view.parts]
    return MaskData(
        place=place,
        generation_row=row,
        mask_view=mask_view,
        segments=segments,
        layout=layout,
        view_mode=view,
        states=states(layout.grid, view),
        tables=states(layout.grid, "received") if options.blocks else None,
        strip_states=states(layout.strip_grid, view) if layout.strip_grid else None,
        map_states=states(layout.map_grid, view) if layout.map_grid else None,
        matrix=matrix,
        blocks=blocks,
        current=current,
        cursor=cursor,
        tokens={},
        lse_check=check,
        mask=mask,
        empty_rows=np.flatnonzero(np.concatenate(is_empty)),
        fallback_reason=fallback_reason,
    )


def _load_matrix_at(
    mask_view: MaskView, segments: tuple[Segment, ...], layout: MaskLayout, at: tuple[int, int]
) -> SegmentMatrix:
    """Load the matrix of segments, with the pair of the cell `at` (row, key) selected."""
    positions = (int(mask_view.positions[at[0]]), at[1])
    number, key_number = (max(segment_number(segments, position), 0) for position in positions)
    size = (layout.width, layout.matrix - (layout.zoom >= 0))
    return load_matrix(mask_view, segments, size, (number, key_number))


def _find_cursor(view: MaskView, options: MaskOptions, place: TracePlace) -> tuple[int, int] | None:
    q, kv = options.q, options.kv
    if q is None and kv is None:
        q = kv = place.pos
    if q is None and kv is None:
        return None
    row = view.n_rows - 1
    if q is not None:
        distances = np.abs(view.positions - q)
        nearest = np.flatnonzero(distances == distances.min())
        row = int(nearest[-1] if distances[nearest[0]] == 0 else nearest[0])
    key = int(view.positions[row]) if kv is None else kv
    return row, min(max(key, 0), view.n_keys - 1)


def _choose_view_mode(
    mask_view: MaskView, requested: MaskViewMode | Literal["auto"]
) -> tuple[MaskViewMode, str]:
    """Return the view to show, and the reason if it is not the requested one. Raises `Missing`."""
    if requested == "auto":
        differs = mask_view.count("lost") or mask_view.count("leaked")
        requested = "difference" if differs else "executed"
    if requested in ("declared", "difference") and mask_view.spec is None:
        reason = "No mask was declared, so there is nothing to compare with"
        return _choose_view_mode(mask_view, "executed")[0], reason
    if requested not in ("executed", "difference") or mask_view.n_known():
        return requested, ""
    source, head = mask_view.source, mask_view.head
    if any(load_blocks(source, part, head).blocks for part in mask_view.parts):
        return "received", "The executed cells were not recorded; this is the received mask"
    if mask_view.spec is not None:
        return "declared", "The executed cells were not recorded; this is the declared mask"
    hint = "Record with --level advanced or higher; masks of up to 67 million cells are kept."
    raise Missing("The mask of this layer was not recorded.", import_hint(source, hint))


# -- tokens ---------------------------------------------------------------------------------------


def _named_positions(data: MaskData) -> set[int]:
    """Return the positions whose tokens are named in the text and along the axes."""
    mask_view, grid, focus = data.mask_view, data.layout.grid, data.focus_row
    rows = [mask_view.n_rows - 1 if focus is None else focus]
    rows += data.current[-1:] if data.current else []
    rows += data.empty_rows[:MAX_LISTED_ROWS].tolist()
    keys = [data.cursor[1]] if data.cursor else []
    for cell in (mask_view.first_cell("lost"), mask_view.first_cell("leaked")):
        if cell is not None:
            rows.append(cell[0])
            keys.append(cell[1])
    if grid.row_scale == 1 and data.layout.left:
        rows += range(grid.row, min(grid.row_stop, mask_view.n_rows))
    if grid.key_scale == 1 and data.layout.token_lines:
        keys += range(grid.key, min(grid.key_stop, mask_view.n_keys))
    return {*mask_view.positions[rows].tolist(), *keys}


def segment_color_at(segments: Sequence[Segment], position: int) -> int:
    """Return the number of the colour of a position's segment, -1 for separators."""
    return segment_color(segment_number(segments, position), segments)


def segment_number(segments: Sequence[Segment], position: int) -> int:
    """Return the number of the segment of a position (the last one beyond the end), or -1.

    `segments` are in order of their starts.
    """
    return bisect_right(segments, position, key=lambda segment: segment.start) - 1


def load_states(
    mask_view: MaskView, blocks: Sequence[BlockPart], grid: PixelGrid, view: MaskViewMode
) -> States:
    """Return a window of a view as states, cached because it is the same at most steps."""
    serials = tuple(part.serial for part in mask_view.parts)
    make: Callable[[], States] = partial(_make_states, mask_view, grid, view)
    if view == "received":
        make = partial(_make_table_states, mask_view, blocks, grid)
    return mask_view.source.get_or_create(
        ("mask.window", serials, mask_view.head, grid, view), make
    )


def _make_states(mask_view: MaskView, grid: PixelGrid, view: MaskViewMode) -> States:
    """Draw a window of the executed mask, the declared mask, or their difference."""
    if view == "declared":
        size = viewport.pixel_sizes(grid, [(0, mask_view.n_rows)], mask_view.n_keys)
        window, stop = PixelCounts(size, grid.empty()), min(grid.row_stop, mask_view.n_rows)
        for row in range(grid.row, stop, CHUNK_ROWS):
            packed = mask_view.declared(row, min(row + CHUNK_ROWS, stop), mask_view.n_keys)
            viewport.fold_rows(packed, row, grid, window.open)
        return window.pixel_states()
    known = [span for part in mask_view.parts for span in part.known_spans()]
    window = PixelCounts(viewport.pixel_sizes(grid, known, mask_view.n_keys), grid.empty())
    if view == "difference":
        window = replace(window, lost=grid.empty(), leaked=grid.empty())
    for part in mask_view.parts:
        _add_part(mask_view, part, grid, window)
    return window.pixel_states()


def _add_part(mask_view: MaskView, part: MaskPart, grid: PixelGrid, window: PixelCounts) -> None:
    if part.row >= grid.row_stop or part.stop <= grid.row:
        return
    if grid.in_tiles:
        for kind in ("open", "lost", "leaked"):
            if (out := getattr(window, kind)) is not None:
                viewport.fold_tiles(getattr(part.counts, kind), part.row, grid, out)
        return
    start, stop = max(grid.row, part.row), min(grid.row_stop, part.stop)
    packed = part.rows(mask_view.source, mask_view.head, start - part.row, stop - part.row)
    viewport.fold_rows(packed, start, grid, window.open)
    if window.lost is not None and window.leaked is not None:
        lost, leaked = mask_view.differing_rows(part, start, stop)
        viewport.fold_rows(lost, start, grid, window.lost)
        viewport.fold_rows(leaked, start, grid, window.leaked)


def _make_table_states(mask_view: MaskView, blocks: Sequence[BlockPart], grid: PixelGrid) -> States:
    """Draw a window of the block tables; a dense mask is received as executed."""
    spans: list[tuple[int, int]] = []
    partial_counts, full = grid.empty(), PixelCounts(grid.empty(), grid.empty())
    for part, tables in zip(mask_view.parts, blocks, strict=True):
        spans += tables.spans
        for layout in tables.blocks:
            viewport.fold_blocks(layout, grid, partial_counts, full.open)
        if tables.is_dense:
            spans += part.known_spans()
            _add_part(mask_view, part, grid, full)
    size = viewport.pixel_sizes(grid, spans, mask_view.n_keys)
    return viewport.block_states(partial_counts, full.open, size)
