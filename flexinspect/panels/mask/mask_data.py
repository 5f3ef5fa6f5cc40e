"""The data of the mask panel: the mask view, the pixels of the visible window, and its tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.drawing.token_cells import TokenCell
from flexinspect.masks import viewport
from flexinspect.masks.algebra import declared_spec
from flexinspect.masks.attention_row import UNCHECKED, LseCheck, recorded_check
from flexinspect.masks.counting import CHUNK_ROWS, PositionGroups
from flexinspect.masks.viewport import SCALES, PixelCounts, PixelGrid, States
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.mask.mask_grid import (
    BlockPart,
    MaskLoader,
    MaskPart,
    MaskView,
    close_dropped_keys,
    load_blocks,
)
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
    same for the block tables, None if they are not shown. `current` are the rows of the place's
    step, `cursor` is (row, key). `tokens` has the tokens that are named, by position. `mask` is the
    mask of the cursor's row, or of the current step. `fallback_reason` says why another view than
    the requested one is shown, "" if it is the requested one. `lse_check` is that of the step's
    newest row.
    """

    place: TracePlace
    generation_row: GenerationRow
    mask_view: MaskView
    segments: tuple[Segment, ...]
    layout: MaskLayout
    view_mode: MaskViewMode
    states: States
    tables: States | None
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
    layout = mask_layout(request.width, request.height, shape, focus, options)
    blocks: tuple[BlockPart, ...] = ()
    with_tables = options.blocks or view == "received"
    if with_tables or mask_view.count("lost") or mask_view.count("leaked"):
        blocks = tuple(load_blocks(source, part, mask_view.head) for part in mask_view.parts)
    states = partial(load_states, mask_view, blocks, layout.grid)
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
        states=states(view),
        tables=states("received") if options.blocks else None,
        blocks=blocks,
        current=current,
        cursor=cursor,
        tokens={},
        lse_check=check,
        mask=mask,
        empty_rows=np.flatnonzero(np.concatenate(is_empty)),
        fallback_reason=fallback_reason,
    )


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
    raise Missing("The mask of this layer was not recorded.", hint)


# -- tokens ---------------------------------------------------------------------------------------


def _named_positions(data: MaskData) -> set[int]:
    """Return the positions whose tokens are named in the text and along the axes."""
    mask_view, grid, focus = data.mask_view, data.layout.grid, data.focus_row
    rows = [mask_view.n_rows - 1 if focus is None else focus]
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
        declared = mask_view.declared(start, stop, part.n_keys)
        close_dropped_keys(declared, part.steps, start - part.row)
        declared[~part.known[start - part.row : stop - part.row]] = 0
        viewport.fold_rows(declared & ~packed, start, grid, window.lost)
        viewport.fold_rows(packed & ~declared, start, grid, window.leaked)


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


MaskViewMode = Literal["executed", "received", "declared", "difference"]

CELL_WIDTHS = (8, 6, 4, 2)
"""Columns per cell of small masks, largest first; half as many lines, so that cells are square."""

FLAT_RATIO = 4
"""Ratio of the scale of keys to that of rows from which the two scales are independent."""


class MaskOptions(Struct, frozen=True):
    """Options of the mask panel.

    `zoom` counts levels from the whole mask (0) to single cells. The cursor is at the positions `q`
    and `kv`, None without a cursor. `row` and `key` are the first visible ones, None for a window
    around the cursor or the current step.
    """

    view: MaskViewMode | Literal["auto"] = "auto"
    blocks: bool = False
    zoom: int = 0
    q: int | None = None
    kv: int | None = None
    row: int | None = None
    key: int | None = None


class MaskLayout(Struct, frozen=True):
    """The layout of a picture of `width` and `height` cells.

    From the top: `header` lines for segments, `token_lines` for the tokens of the keys, `lines` of
    the grid, `footer` lines. The margin is `left` columns wide, the last one for marks. The grid's
    pixels are `cell_width` columns wide and as many half lines high.
    """

    width: int
    height: int
    left: int
    header: int
    token_lines: int
    lines: int
    footer: int
    grid: PixelGrid
    cell_width: int
    zoom: int
    last_zoom: int

    @property
    def top(self) -> int:
        """First line of the grid."""
        return self.header + self.token_lines

    def cell_at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the (row, key) at a cell of the picture: the upper one of two."""
        column, line = x - self.left, y - self.top
        if not (0 <= column < self.grid.width * self.cell_width and 0 <= line < self.lines):
            return None
        row = self.grid.row + 2 * line // self.cell_width * self.grid.row_scale
        key = self.grid.key + column // self.cell_width * self.grid.key_scale
        return row, key


def mask_layout(
    width: int, height: int, shape: tuple[int, int], focus: tuple[int, int], options: MaskOptions
) -> MaskLayout:
    """Lay out a mask of `shape` (rows, keys) around the cell `focus` (row, key)."""
    margins = ((80, 15), (56, 11), (34, 7), (20, 3))
    left = next((columns for least, columns in margins if width >= least), 0)
    header = int(height >= 5)
    footer = (height >= 3) + (height >= 10) + (height >= 26)
    lines, columns = max(height - header - footer, 1), max(width - left, 1)
    steps = zoom_steps(shape, lines, columns)
    zoom = min(max(options.zoom, 0), len(steps) - 1)
    row_scale, key_scale, cell = steps[zoom]
    needed = -(-(-(-shape[0] // row_scale) * cell) // 2)
    token_lines = 0
    if (row_scale, key_scale) == (1, 1) and height >= 12:
        most = 1 if cell >= 6 else 6
        token_lines = min(lines - needed, most) if needed <= lines and zoom == 0 else most
        if most > 1 and token_lines < 3:
            token_lines = 0
    lines = min(lines - token_lines, needed)
    rows = max(2 * lines // cell, 1)
    row, rows = _visible(shape[0], row_scale, rows, focus[0], options.row)
    key, keys = _visible(shape[1], key_scale, max(columns // cell, 1), focus[1], options.key)
    return MaskLayout(
        width=width,
        height=height,
        left=left,
        header=header,
        token_lines=token_lines,
        lines=-(-rows * cell // 2),
        footer=footer,
        grid=PixelGrid(row, key, rows, keys, row_scale, key_scale),
        cell_width=cell,
        zoom=zoom,
        last_zoom=len(steps) - 1,
    )


def zoom_steps(shape: tuple[int, int], lines: int, columns: int) -> list[tuple[int, int, int]]:
    """Return (row scale, key scale, cell width) from the whole mask to single large cells."""
    most = min(columns, 2 * lines)
    for width in CELL_WIDTHS:
        if shape[0] * width <= 2 * lines and shape[1] * width <= columns:
            larger = (n for n in (4, 8) if width < n <= most)
            return [(1, 1, n) for n in (width, *larger)]
    rows, keys = _fit_scale(shape[0], 2 * lines), _fit_scale(shape[1], columns)
    if keys <= FLAT_RATIO * rows:
        rows = keys = max(rows, keys)
    steps = [(rows, keys, 1)]
    while (rows, keys) != (1, 1):
        rows, keys = _finer_scale(rows), _finer_scale(keys)
        steps.append((rows, max(keys, rows), 1))
    return steps + [(1, 1, n) for n in (2, 4, 8) if n <= most]


def _fit_scale(total: int, room: int) -> int:
    return SCALES[min(bisect_left(SCALES, -(-total // max(room, 1))), len(SCALES) - 1)]


def _finer_scale(scale: int) -> int:
    return SCALES[max(bisect_right(SCALES, scale // 2) - 1, 0)]


def _visible(total: int, scale: int, room: int, focus: int, start: int | None) -> tuple[int, int]:
    """Return (first cell, number of pixels) of the visible part of an axis of `total` cells.

    Without a `start` the focus is in the second half of the room, and the window moves by halves
    of the room, so that it does not move at most steps.
    """
    pixels = -(-total // scale)
    if pixels <= room:
        return 0, max(pixels, 1)
    half, first = room // 2, (focus if start is None else start) // scale
    if start is None and half:
        first = (first // half - 1) * half
    return min(max(first, 0), pixels - room) * scale, room


def scroll_window(layout: MaskLayout, row: int, key: int) -> tuple[int | None, int | None]:
    """Return the first row and key of a window that contains a cell.

    The window does not move along an axis on which the cell is visible; otherwise the cell comes
    to its middle.
    """
    grid = layout.grid
    first_row, first_key = grid.row, grid.key
    if not grid.row <= row < grid.row_stop:
        first_row = row - grid.height * grid.row_scale // 2
    if not grid.key <= key < grid.key_stop:
        first_key = key - grid.width * grid.key_scale // 2
    return max(first_row, 0), max(first_key, 0)


def format_scale(layout: MaskLayout) -> str:
    """Return the scale as "1:4", "2:1" or "1:8 x 1:512" (rows, then keys)."""
    grid = layout.grid
    if layout.cell_width > 1:
        return f"{layout.cell_width}:1"
    if grid.row_scale == grid.key_scale:
        return f"1:{grid.row_scale}"
    return f"1:{grid.row_scale} x 1:{grid.key_scale}"
