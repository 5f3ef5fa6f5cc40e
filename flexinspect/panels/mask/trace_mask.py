"""The masks of a trace as masks of cells: executed, received and declared, over positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import DEFAULT_LANGUAGE, Labels, load_labels
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.counting import PositionGroups
from flexinspect.masks.known_masks import CombinedMask, RuleMask, spec_mask
from flexinspect.masks.mask_presets import BoolArray, IntArray, declared_spec
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.mask_grid import (
    MIN_STEPS,
    WINDOW_STEPS,
    MaskLoader,
    MaskPart,
    MaskView,
    load_blocks,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.trace.queries import generation_in_branch, read_tokens

TraceView = Literal["executed", "received", "declared", "difference"]


class TraceMask(Struct, frozen=True):
    """The mask of a layer and head, up to a step: rows and keys are positions.

    `mask` is the one of the requested view, `declared` the declared mask without the keys that a
    sliding cache had dropped, None if none was declared. `n_unknown` rows were not recorded; their
    cells are closed. `words` are token texts by position.
    """

    mask: CellMask
    declared: CellMask | None
    n_rows: int
    n_keys: int
    segments: tuple[Segment, ...]
    words: Mapping[int, str]
    n_unknown: int


def load_trace_mask(
    source: Source,
    place: TracePlace,
    view: TraceView,
    *,
    last_step: int | None = None,
    labels: Labels | None = None,
) -> TraceMask:
    """Return the mask of a place's layer and head, of the steps up to `last_step` (None: all).

    `labels` name the mask, in English by default. Raises `UsageError` if the view was not recorded,
    and `TraceError`.
    """
    reader = source.reader
    row = generation_in_branch(reader, reader.generation(place.generation), place.branch)
    spec = declared_spec(row.declared)
    loader = MaskLoader(source, place, spec, PositionGroups())
    views = list(_load_views(loader, last_step))
    rows = _Rows.of(views, last_step)
    if rows is None:
        raise UsageError("No step of this generation has processed a token yet.")
    names = labels or load_labels(DEFAULT_LANGUAGE)
    kind = "received" if view == "received" else "executed"
    name = names(f"figure_trace_{kind}", layer=place.layer, head=views[0].head)
    executed = _PartsMask(name, source, rows, views[0].head)
    declared: CellMask | None = None
    if spec is not None:
        kept = RuleMask("kept", lambda q, kv: kv >= rows.kv_offset[q])
        declared = CombinedMask("and", (spec_mask(spec), kept)) if rows.has_dropped else None
        declared = declared or spec_mask(spec)
    mask, n_unknown = _mask_of_view(view, executed, declared)
    n_tokens = len(rows.part)
    words = {
        token.pos: token.text or token.token
        for token in read_tokens(reader, place.generation, place.branch, 0, rows.n_keys)
    }
    segments = tuple(_clipped(load_segments(reader, place), max(n_tokens, rows.n_keys)))
    return TraceMask(mask, declared, n_tokens, rows.n_keys, segments, words, n_unknown)


def _mask_of_view(
    view: TraceView, executed: _PartsMask, declared: CellMask | None
) -> tuple[CellMask, int]:
    """Return the mask of a view and its number of unknown rows. Raises `UsageError`."""
    if view == "declared" or (view == "difference" and declared is None):
        if declared is None:
            hint = "Use --view executed, or declare it: flexinspect declare --help."
            raise UsageError("No mask was declared in this run.", hint=hint)
        return declared, 0
    if view == "received":
        mask = _ReceivedMask(executed.name, executed)
        return mask, mask.check()
    n_unknown = int((~executed.rows.known).sum())
    if n_unknown == len(executed.rows.known):
        hint = "Record with --level advanced or higher, or use --view received or declared."
        raise UsageError("The cells of this layer's mask were not recorded.", hint=hint)
    return executed, n_unknown


def _load_views(loader: MaskLoader, last_step: int | None) -> Iterator[MaskView]:
    """Yield views that together hold all steps: one holds a window of a long generation."""
    step = 0
    while (view := replace(loader, place=replace(loader.place, step=step)).load()) is not None:
        yield view
        stop = view.n_steps if last_step is None else min(view.n_steps, last_step + 1)
        if view.last_step + 1 >= stop:
            return
        # A window begins at least so many steps before its step, however many keys it has.
        step = view.last_step + 1 + min(WINDOW_STEPS, MIN_STEPS // 2)


class _Rows(Struct, frozen=True):
    """Where the row of each position is: `part` -1 if no step had it as input."""

    parts: tuple[MaskPart, ...]
    part: npt.NDArray[np.intp]
    index: npt.NDArray[np.intp]
    known: BoolArray
    kv_offset: npt.NDArray[np.int32]
    n_keys: int

    @property
    def has_dropped(self) -> bool:
        """Whether a sliding cache had dropped keys of any row."""
        return bool(self.kv_offset.any())

    @classmethod
    def of(cls, views: list[MaskView], last_step: int | None) -> _Rows | None:
        """Return the rows of all views up to a step, None without any."""
        parts: dict[int, MaskPart] = {}
        for part in (part for view in views for part in view.parts):
            parts.setdefault(part.steps[0].step, part)
        found = tuple(parts.values())
        n_rows = max((int(part.positions.max(initial=-1)) + 1 for part in found), default=0)
        if not n_rows:
            return None
        number, index = np.full(n_rows, -1, np.intp), np.zeros(n_rows, np.intp)
        known, kv_offset = np.zeros(n_rows, np.bool_), np.zeros(n_rows, np.int32)
        for part_number, part in enumerate(found):
            at = 0
            for step in part.steps:
                own, at = slice(at, at + step.n_rows), at + step.n_rows
                if last_step is not None and step.step > last_step:
                    continue
                positions = part.positions[own]
                number[positions], index[positions] = part_number, np.arange(own.start, own.stop)
                known[positions], kv_offset[positions] = part.known[own], step.kv_offset
        n_shown = int(np.flatnonzero(number >= 0).max(initial=-1)) + 1
        n_keys = max(n_shown, 1) if last_step is not None else max(p.n_keys for p in found)
        shown = slice(n_shown)
        return cls(found, number[shown], index[shown], known[shown], kv_offset[shown], n_keys)

    def groups(self, q_idx: IntArray) -> Iterator[tuple[MaskPart, Numbers, Numbers]]:
        """Yield parts, which of the rows are theirs, and the numbers of these in the part."""
        inside = np.flatnonzero((q_idx >= 0) & (q_idx < len(self.part)))
        numbers = self.part[q_idx[inside]]
        for number in np.flatnonzero(np.bincount(numbers[numbers >= 0])).tolist():
            own = inside[numbers == number]
            yield self.parts[number], own, self.index[q_idx[own]]


Numbers = npt.NDArray[np.intp]


class _PartsMask(Struct, frozen=True):
    """The executed cells of a trace."""

    name: str
    source: Source
    rows: _Rows
    head: int
    n_heads: int = 1

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        cells = np.zeros((len(q_idx), len(kv_idx)), np.bool_)
        for part, own, index in self.rows.groups(q_idx):
            first = int(index.min())
            packed = part.rows(self.source, self.head, first, int(index.max()) + 1)[index - first]
            inside = np.flatnonzero((kv_idx >= 0) & (kv_idx < 8 * packed.shape[1]))
            keys = kv_idx[inside]
            bits = packed[:, keys // 8] >> (7 - keys % 8).astype(np.uint8) & 1
            cells[np.ix_(own, inside)] = bits.astype(np.bool_)
        return cells


class _ReceivedMask(Struct, frozen=True):
    """The cells of blocks that are visited; a dense mask is received as it is executed."""

    name: str
    executed: _PartsMask
    n_heads: int = 1

    def check(self) -> int:
        """Return the number of rows without a received mask. Raises `UsageError` if all are."""
        executed = self.executed
        parts = executed.rows.parts
        blocks = [load_blocks(executed.source, part, executed.head) for part in parts]
        found = np.array([bool(each.blocks) or each.is_dense for each in blocks])
        n_unknown = int((~found[executed.rows.part] | (executed.rows.part < 0)).sum())
        if not found.any():
            hint = "Record with --level advanced or higher."
            raise UsageError("No block tables of this layer were recorded.", hint=hint)
        return n_unknown

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        executed = self.executed
        cells = np.zeros((len(q_idx), len(kv_idx)), np.bool_)
        for part, own, index in executed.rows.groups(q_idx):
            tables = load_blocks(executed.source, part, executed.head)
            if tables.is_dense:
                cells[own] = executed.cells(q_idx[own], kv_idx)
            for layout in tables.blocks:
                line = np.searchsorted(layout.rows, index + part.row, side="right") - 1
                column = np.searchsorted(layout.keys, kv_idx, side="right") - 1
                visited = layout.partial | layout.full
                rows = np.flatnonzero((line >= 0) & (line < visited.shape[0]))
                keys = np.flatnonzero((column >= 0) & (column < visited.shape[1]))
                cells[np.ix_(own[rows], keys)] = visited[np.ix_(line[rows], column[keys])]
        return cells


def _clipped(segments: list[Segment], n: int) -> Iterator[Segment]:
    """Yield segments with the end of generated text set to the length `n`."""
    for segment in segments:
        is_open = segment.kind is SegmentKind.GENERATED
        yield replace(segment, stop=max(n, segment.start)) if is_open else segment
