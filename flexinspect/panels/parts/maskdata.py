"""What the mask panel shows, fetched: the sheet, the window of it that is seen, its words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexinspect.attention import UNCHECKED, LseCheck
from flexinspect.masks import declared_spec
from flexinspect.masksheets.counting import PositionGroups
from flexinspect.masksheets.windows import States
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.parts.maskblocks import BlockPart, load_blocks
from flexinspect.panels.parts.maskframe import MaskLayout, MaskOptions, MaskViewMode, mask_layout
from flexinspect.panels.parts.maskload import MaskViewRequest, load_mask_view
from flexinspect.panels.parts.maskparts import MaskView
from flexinspect.panels.parts.masktokens import load_token_cells, segment_number
from flexinspect.panels.parts.maskwindow import load_states, load_table_states
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment
from flexinspect.records import CallRecord, MaskRecord
from flexinspect.trace.branchfacts import generation_in_branch
from flexinspect.trace.callranges import lineage
from flexinspect.trace.ranges import branch_of_step
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import GenerationRow
from flexinspect.trace.sequences import n_generations
from flexinspect.widgets.tokencells import TokenCell

MAX_LISTED_ROWS = 8
"""Empty rows that are named with their words."""


@dataclass(frozen=True, slots=True)
class MaskData:
    """A window of a sheet, ready to be drawn and to be put in words.

    `states` are the pixels of the frame's grid (see `masksheets.windows`), `tables` what the block
    tables say of them (the same states), None where they are not asked for. `current` are the rows
    of the place's step, `cursor` is (row, key). `words` holds the tokens that are named, by
    position. `mask` describes the mask of the cursor's row, or of the current step. `why` says why
    another view is shown than was asked for, "" where it is not.
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
    call: CallRecord | None
    mask: MaskRecord | None
    empty_rows: npt.NDArray[np.intp]
    fallback_reason: str = ""

    @property
    def lse_check(self) -> LseCheck:
        """How far this step's newest row is from what ran."""
        return (
            LseCheck(self.call.gate, self.call.gate_kind, self.call.dtype)
            if self.call
            else UNCHECKED
        )

    def segment(self, position: int) -> Segment | None:
        """Return the segment of a position."""
        number = segment_number(self.segments, position)
        return self.segments[number] if number >= 0 else None

    def block_part(self, row: int) -> BlockPart | None:
        """Return the block tables of the part that holds a row."""
        parts = zip(self.mask_view.parts, self.blocks, strict=False)
        return next((blocks for part, blocks in parts if row < part.stop), None)


def load_mask(source: Source, request: Request[MaskOptions]) -> MaskData:
    """Return what is to be drawn at a place. Raises `Missing`, `TraceError`."""
    place, reader = request.place, source.reader
    if place.generation >= n_generations(reader):
        raise Missing("No step of this generation is recorded yet.", "Wait for its first step.")
    about = generation_in_branch(reader, reader.generation(place.generation), place.branch)
    segments = _load_segments(reader, place)
    call = _find_call(reader, place)
    if call is not None:
        place = replace(place, layer=call.layer)
    view_request = MaskViewRequest(
        *(place.generation, place.branch, place.step, place.layer, place.head),
        declared_spec(about.declared),
        PositionGroups(tuple(s.start for s in segments) or (0,)),
    )
    mask_view = load_mask_view(source, view_request)
    if mask_view is None or not mask_view.n_keys:
        raise Missing("No step of this generation has fed a row yet.")
    data = _make_mask_data(request, place, about, mask_view, segments)
    return _with_tokens(source, replace(data, call=call))


def _find_call(reader: TraceReader, place: TracePlace) -> CallRecord | None:
    """Return the call of the place's layer, of the first layer if it has none, None without any."""
    owner = branch_of_step(reader, place.generation, place.step, place.branch)
    calls = reader.calls(place.generation, place.step, owner)
    return next((call for call in calls if call.layer == place.layer), calls[0] if calls else None)


def _load_segments(reader: TraceReader, place: TracePlace) -> tuple[Segment, ...]:
    for branch, _, _ in lineage(reader, place.generation, place.branch):
        found = reader.segments(place.generation, branch)
        if found:
            return tuple(sorted(found, key=lambda segment: segment.start))
    return ()


def _make_mask_data(
    request: Request[MaskOptions],
    place: TracePlace,
    about: GenerationRow,
    mask_view: MaskView,
    segments: tuple[Segment, ...],
) -> MaskData:
    """Return the data without words, call and mask."""
    source, options = mask_view.source, request.options
    current = mask_view.rows_of_step(place.step)
    cursor = _find_cursor(mask_view, options, place)
    view, why = _choose_view_mode(source, mask_view, options.view, current)
    focus = cursor or _default_focus(mask_view, current)
    shape = (mask_view.n_rows, mask_view.n_keys)
    layout = mask_layout(request.width, request.height, shape, options.zoom, focus, options)
    blocks: tuple[BlockPart, ...] = ()
    tables: States | None = None
    if options.blocks or view == "received" or mask_view.count("lost") or mask_view.count("leaked"):
        blocks = tuple(load_blocks(source, part, mask_view.head) for part in mask_view.parts)
    if options.blocks or view == "received":
        tables = load_table_states(mask_view, blocks, layout.grid)
    states = tables if view == "received" and tables is not None else None
    return MaskData(
        place=place,
        generation_row=about,
        mask_view=mask_view,
        segments=segments,
        layout=layout,
        view_mode=view,
        states=load_states(mask_view, layout.grid, view) if states is None else states,
        tables=tables if options.blocks else None,
        blocks=blocks,
        current=current,
        cursor=cursor,
        tokens={},
        call=None,
        mask=None,
        empty_rows=_find_empty_rows(mask_view),
        fallback_reason=why,
    )


def _find_cursor(
    mask_view: MaskView, options: MaskOptions, place: TracePlace
) -> tuple[int, int] | None:
    q, kv = options.q, options.kv
    if q is None and kv is None:
        q = kv = place.pos
    if q is None and kv is None:
        return None
    row = None if q is None else mask_view.row_of(q)
    if row is None:
        row = mask_view.n_rows - 1 if q is None else _nearest_row(mask_view, q)
    key = int(mask_view.positions[row]) if kv is None else kv
    return row, min(max(key, 0), mask_view.n_keys - 1)


def _nearest_row(mask_view: MaskView, position: int) -> int:
    return int(np.abs(mask_view.positions - position).argmin())


def _default_focus(mask_view: MaskView, current: range | None) -> tuple[int, int]:
    row = mask_view.n_rows - 1 if current is None else current[-1]
    return row, min(int(mask_view.positions[row]), mask_view.n_keys - 1)


RECORD_CELLS_HINT = "Cells are recorded from --level advanced on, up to 67 million of a mask."


def _choose_view_mode(
    source: Source, mask_view: MaskView, asked: MaskViewMode, current: range | None
) -> tuple[MaskViewMode, str]:
    """Return the view that can be shown, and why it is another one. Raises `Missing`."""
    if asked in ("declared", "difference") and mask_view.spec is None:
        return _choose_view_mode(source, mask_view, "executed", current)[0], (
            "No mask was declared as a rule, so there is nothing to compare with"
        )
    if asked not in ("executed", "difference") or mask_view.n_known():
        return asked, ""
    if any(load_blocks(source, part, mask_view.head).blocks for part in mask_view.parts):
        return "received", "The executed cells were not recorded; this is what was received"
    if mask_view.spec is not None:
        return "declared", "The executed cells were not recorded; this is what was declared"
    raise Missing("The mask of this layer was not recorded.", RECORD_CELLS_HINT)


def _find_empty_rows(mask_view: MaskView) -> npt.NDArray[np.intp]:
    """Return the rows that see nothing, of those that were recorded."""
    found: list[npt.NDArray[np.intp]] = []
    for part in mask_view.parts:
        rows = np.flatnonzero(part.counts.open.row_counts == 0)
        if len(rows) and part.known is not True:
            rows = rows[[part.is_known(part.row + row) for row in rows.tolist()]]
        found.append(rows + part.row)
    return np.concatenate(found)


# -- words ----------------------------------------------------------------------------------------


def _with_tokens(source: Source, data: MaskData) -> MaskData:
    mask_view, grid = data.mask_view, data.layout.grid
    row = (
        data.cursor[0]
        if data.cursor
        else data.current[-1]
        if data.current
        else mask_view.n_rows - 1
    )
    name = mask_view.part_of(row).step_at(row).mask
    mask = None
    if name is not None:
        key = ("mask.summary", name)
        mask = source.get_or_create(key, lambda: source.reader.mask_summary(name), lambda _: 1024)
    positions = _named_positions(data, row)
    if grid.row_scale == 1 and data.layout.left:
        stop = min(grid.row_stop, mask_view.n_rows)
        positions |= set(mask_view.positions[grid.row : stop].tolist())
    if grid.key_scale == 1 and data.layout.token_lines:
        positions |= set(range(grid.key, min(grid.key_stop, mask_view.n_keys)))
    return replace(
        data, mask=mask, tokens=load_token_cells(source, data.place, data.segments, positions)
    )


def _named_positions(data: MaskData, row: int) -> set[int]:
    """Return the positions that the words speak of."""
    mask_view = data.mask_view
    rows = [row, *data.empty_rows[:MAX_LISTED_ROWS].tolist()]
    keys = [data.cursor[1]] if data.cursor else []
    for first in (mask_view.first_cell("lost"), mask_view.first_cell("leaked")):
        if first is not None:
            rows.append(first[0])
            keys.append(first[1])
    return {*mask_view.positions[rows].tolist(), *keys}
