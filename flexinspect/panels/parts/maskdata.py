"""What the mask panel shows, fetched: the sheet, the window of it that is seen, its words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexinspect.attention import UNCHECKED, Gate
from flexinspect.masks import declared_rule
from flexinspect.masksheets.counting import Groups
from flexinspect.masksheets.windows import States
from flexinspect.panels.base import Missing, Place, Request
from flexinspect.panels.parts.maskblocks import BlockPart, load_blocks
from flexinspect.panels.parts.maskframe import Frame, MaskOptions, View, arrange
from flexinspect.panels.parts.maskload import Wanted, load_sheet
from flexinspect.panels.parts.maskparts import Sheet
from flexinspect.panels.parts.masktokens import load_words, segment_number
from flexinspect.panels.parts.maskwindow import load_states, load_table_states
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment
from flexinspect.records import CallRecord, MaskRecord
from flexinspect.trace.branchfacts import in_branch
from flexinspect.trace.callranges import lineage
from flexinspect.trace.ranges import holder
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import GenerationRow
from flexinspect.trace.sequences import n_generations
from flexinspect.widgets.tokencells import Word

MOST_LISTED = 8
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

    place: Place
    about: GenerationRow
    sheet: Sheet
    segments: tuple[Segment, ...]
    frame: Frame
    view: View
    states: States
    tables: States | None
    blocks: tuple[BlockPart, ...]
    current: range | None
    cursor: tuple[int, int] | None
    words: dict[int, Word]
    call: CallRecord | None
    mask: MaskRecord | None
    empty: npt.NDArray[np.intp]
    why: str = ""

    @property
    def gate(self) -> Gate:
        """How far this step's newest row is from what ran."""
        return (
            Gate(self.call.gate, self.call.gate_kind, self.call.dtype) if self.call else UNCHECKED
        )

    def segment(self, position: int) -> Segment | None:
        """Return the segment of a position."""
        number = segment_number(self.segments, position)
        return self.segments[number] if number >= 0 else None

    def block_part(self, row: int) -> BlockPart | None:
        """Return the block tables of the part that holds a row."""
        parts = zip(self.sheet.parts, self.blocks, strict=False)
        return next((blocks for part, blocks in parts if row < part.stop), None)


def load_mask(source: Source, request: Request[MaskOptions]) -> MaskData:
    """Return what is to be drawn at a place. Raises `Missing`, `TraceError`."""
    place, reader = request.place, source.reader
    if place.generation >= n_generations(reader):
        raise Missing("No step of this generation is recorded yet.", "Wait for its first step.")
    about = in_branch(reader, reader.generation(place.generation), place.branch)
    segments = _segments(reader, place)
    call = _call(reader, place)
    if call is not None:
        place = replace(place, layer=call.layer)
    wanted = Wanted(
        *(place.generation, place.branch, place.step, place.layer, place.head),
        declared_rule(about.declared),
        Groups(tuple(s.start for s in segments) or (0,)),
    )
    sheet = load_sheet(source, wanted)
    if sheet is None or not sheet.n_keys:
        raise Missing("No step of this generation has fed a row yet.")
    data = _bare(request, place, about, sheet, segments)
    return _with_words(source, replace(data, call=call))


def _call(reader: TraceReader, place: Place) -> CallRecord | None:
    """Return the call of the place's layer, of the first layer if it has none, None without any."""
    owner = holder(reader, place.generation, place.step, place.branch)
    calls = reader.calls(place.generation, place.step, owner)
    return next((call for call in calls if call.layer == place.layer), calls[0] if calls else None)


def _segments(reader: TraceReader, place: Place) -> tuple[Segment, ...]:
    for branch, _, _ in lineage(reader, place.generation, place.branch):
        found = reader.segments(place.generation, branch)
        if found:
            return tuple(sorted(found, key=lambda segment: segment.start))
    return ()


def _bare(
    request: Request[MaskOptions],
    place: Place,
    about: GenerationRow,
    sheet: Sheet,
    segments: tuple[Segment, ...],
) -> MaskData:
    """Return the data without words, call and mask."""
    source, options = sheet.source, request.options
    current = sheet.rows_of_step(place.step)
    cursor = _cursor(sheet, options, place)
    view, why = _view(source, sheet, options.view, current)
    focus = cursor or _focus(sheet, current)
    shape = (sheet.n_rows, sheet.n_keys)
    frame = arrange(request.width, request.height, shape, options.zoom, focus, options)
    blocks: tuple[BlockPart, ...] = ()
    tables: States | None = None
    if options.blocks or view == "received" or sheet.total("lost") or sheet.total("leaked"):
        blocks = tuple(load_blocks(source, part, sheet.head) for part in sheet.parts)
    if options.blocks or view == "received":
        tables = load_table_states(sheet, blocks, frame.grid)
    states = tables if view == "received" and tables is not None else None
    return MaskData(
        place=place,
        about=about,
        sheet=sheet,
        segments=segments,
        frame=frame,
        view=view,
        states=load_states(sheet, frame.grid, view) if states is None else states,
        tables=tables if options.blocks else None,
        blocks=blocks,
        current=current,
        cursor=cursor,
        words={},
        call=None,
        mask=None,
        empty=_empty(sheet),
        why=why,
    )


def _cursor(sheet: Sheet, options: MaskOptions, place: Place) -> tuple[int, int] | None:
    q, kv = options.q, options.kv
    if q is None and kv is None:
        q = kv = place.pos
    if q is None and kv is None:
        return None
    row = None if q is None else sheet.row_of(q)
    if row is None:
        row = sheet.n_rows - 1 if q is None else _nearest(sheet, q)
    key = int(sheet.positions[row]) if kv is None else kv
    return row, min(max(key, 0), sheet.n_keys - 1)


def _nearest(sheet: Sheet, position: int) -> int:
    return int(np.abs(sheet.positions - position).argmin())


def _focus(sheet: Sheet, current: range | None) -> tuple[int, int]:
    row = sheet.n_rows - 1 if current is None else current[-1]
    return row, min(int(sheet.positions[row]), sheet.n_keys - 1)


RECORD_CELLS = "Cells are recorded from --level advanced on, up to 67 million of a mask."


def _view(source: Source, sheet: Sheet, asked: View, current: range | None) -> tuple[View, str]:
    """Return the view that can be shown, and why it is another one. Raises `Missing`."""
    if asked in ("declared", "difference") and sheet.rule is None:
        return _view(source, sheet, "executed", current)[0], (
            "No mask was declared as a rule, so there is nothing to compare with"
        )
    if asked not in ("executed", "difference") or sheet.n_known():
        return asked, ""
    if any(load_blocks(source, part, sheet.head).blocks for part in sheet.parts):
        return "received", "The executed cells were not recorded; this is what was received"
    if sheet.rule is not None:
        return "declared", "The executed cells were not recorded; this is what was declared"
    raise Missing("The mask of this layer was not recorded.", RECORD_CELLS)


def _empty(sheet: Sheet) -> npt.NDArray[np.intp]:
    """Return the rows that see nothing, of those that were recorded."""
    found: list[npt.NDArray[np.intp]] = []
    for part in sheet.parts:
        rows = np.flatnonzero(part.tally.open.rows == 0)
        if len(rows) and part.known is not True:
            rows = rows[[part.is_known(part.row + row) for row in rows.tolist()]]
        found.append(rows + part.row)
    return np.concatenate(found)


# -- words ----------------------------------------------------------------------------------------


def _with_words(source: Source, data: MaskData) -> MaskData:
    sheet, grid = data.sheet, data.frame.grid
    row = data.cursor[0] if data.cursor else data.current[-1] if data.current else sheet.n_rows - 1
    name = sheet.part_of(row).fed_at(row).mask
    mask = None
    if name is not None:
        key = ("mask.summary", name)
        mask = source.keep(key, lambda: source.reader.mask_summary(name), lambda _: 1024)
    wanted = _named(data, row)
    if grid.row_scale == 1 and data.frame.left:
        stop = min(grid.row_stop, sheet.n_rows)
        wanted |= set(sheet.positions[grid.row : stop].tolist())
    if grid.key_scale == 1 and data.frame.words:
        wanted |= set(range(grid.key, min(grid.key_stop, sheet.n_keys)))
    return replace(data, mask=mask, words=load_words(source, data.place, data.segments, wanted))


def _named(data: MaskData, row: int) -> set[int]:
    """Return the positions that the words speak of."""
    sheet = data.sheet
    rows = [row, *data.empty[:MOST_LISTED].tolist()]
    keys = [data.cursor[1]] if data.cursor else []
    for first in (sheet.first("lost"), sheet.first("leaked")):
        if first is not None:
            rows.append(first[0])
            keys.append(first[1])
    return {*sheet.positions[rows].tolist(), *keys}
