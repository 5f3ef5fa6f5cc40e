"""Edits of a mask in text form, as a branch of a trace states them.

Segments are named by their label or their number. A mask stays causal: a cell above the diagonal
cannot be opened, as the key does not exist yet when a generated row is computed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.errors import MaskError
from flexinspect.masks.key_blocks import row_chunks
from flexinspect.masks.mask_presets import UNREACHABLE, BoolArray, MaskSpec, Segments, preset
from flexinspect.records.prompt import SegmentKind

OPEN_END = UNREACHABLE  # a `stop` beyond every position


class BaseMask(Protocol):
    """A mask that edits apply to, in positions of the whole sequence."""

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return the mask, bool (n_q, n_kv), for the rows from `q_offset` on."""
        ...


class MaskPatch(Struct, frozen=True):
    """A rectangle of cells, `start <= i < stop`; only its causal cells are opened if `is_open`."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    is_open: bool


class PatchedMask(Struct, frozen=True):
    """A mask with patches; later patches override earlier ones."""

    base: BaseMask
    patches: tuple[MaskPatch, ...] = ()

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return the mask, bool (n_q, n_kv), for the rows from `q_offset` on."""
        cells = self.base.dense(n_q, n_kv, q_offset=q_offset)
        return apply_patches(cells, self.patches, q_offset=q_offset)


def apply_patches(
    cells: BoolArray, patches: Sequence[MaskPatch], *, q_offset: int = 0
) -> BoolArray:
    """Return cells (..., rows, keys) with patches applied; row 0 is position `q_offset`."""
    out = cells.copy()
    q_idx = np.arange(q_offset, q_offset + out.shape[-2])
    kv_idx = np.arange(out.shape[-1])
    for patch in patches:
        rows = slice(max(patch.row_start - q_offset, 0), max(patch.row_stop - q_offset, 0))
        keys = slice(patch.key_start, patch.key_stop)
        if patch.is_open:
            out[..., rows, keys] |= kv_idx[None, keys] <= q_idx[rows, None]
        else:
            out[..., rows, keys] = False
    return out


def changed_rows(before: PatchedMask, after: PatchedMask, n_rows: int) -> npt.NDArray[np.intp]:
    """Return which of the first `n_rows` rows differ between two masks.

    Of a mask that is not a `MaskSpec` only some heads may be known, so every row under a new patch
    counts as changed.
    """
    changed = np.zeros(n_rows, np.bool_)
    if not isinstance(before.base, MaskSpec) and before.base is after.base:
        for patch in after.patches[len(before.patches) :]:
            changed[patch.row_start : patch.row_stop] = True
        return np.flatnonzero(changed)
    for start, stop in row_chunks(n_rows):
        old, new = (mask.dense(stop - start, n_rows, q_offset=start) for mask in (before, after))
        changed[start:stop] = (old != new).any(axis=1)
    return np.flatnonzero(changed)


class Edit(Struct, frozen=True):
    """One edit. `kind` is preset, drop, join, see, cell or row.

    `names` holds the preset or the segments (of "see": the query segment, then the key segment),
    `indices` the row, and for a cell also the key. `is_open` None toggles the cell or row.
    """

    kind: str
    names: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    is_open: bool | None = None

    def __str__(self) -> str:
        """The edit in the form that `parse_edit` reads."""
        match self.kind:
            case "join":
                return f"join {self.names[0]} and {self.names[1]}"
            case "see":
                verb = "not see" if self.is_open is False else "see"
                return f"let {self.names[0]} {verb} {self.names[1]}"
            case "preset" | "drop":
                return f"{self.kind} {self.names[0]}"
        words = {None: (), True: ("open",), False: ("close",)}[self.is_open]
        return " ".join(map(str, (self.kind, *self.indices, *words)))


_EDIT_PATTERNS: tuple[tuple[str, str], ...] = (
    ("preset", r"preset (\S+)"),
    ("drop", r"drop (.+)"),
    ("join", r"join (.+) and (.+)"),
    ("hide", r"let (.+) not see (.+)"),
    ("see", r"let (.+) see (.+)"),
    ("cell", r"cell (\d{1,9})[ ,]+(\d{1,9})(?: (open|close))?"),
    ("row", r"row (\d{1,9})(?: (open|close))?"),
)


def parse_edit(text: str) -> Edit:
    """Parse the text form of an edit. Raises `MaskError` with the valid forms."""
    normalized = " ".join(text.split())
    for kind, pattern in _EDIT_PATTERNS:
        match = re.fullmatch(pattern, normalized, re.IGNORECASE)
        if match is None:
            continue
        if kind == "hide":
            return Edit("see", tuple(match.groups()), is_open=False)
        if kind not in ("cell", "row"):
            return Edit(kind, tuple(match.groups()))
        *indices, verb = match.groups()
        is_open = None if verb is None else verb.lower() == "open"
        return Edit(kind, indices=tuple(map(int, indices)), is_open=is_open)
    hint = "Write 'preset NAME', 'drop SEGMENT', 'join SEGMENT and SEGMENT', 'let SEGMENT [not] "
    hint += "see SEGMENT', 'cell ROW KEY [open|close]' or 'row ROW [open|close]'."
    raise MaskError(f"'{text}' is not an edit of a mask.", hint=hint)


def apply_edits(edits: Sequence[Edit], mask: PatchedMask, segments: Segments) -> PatchedMask:
    """Return the mask with edits applied in order.

    Raises `MaskError` for an unknown segment or preset, a key after its row, and edits that change
    nothing.
    """
    after = mask
    for edit in edits:
        if edit.kind == "preset":
            name, _, separators = edit.names[0].partition("/")
            spec = preset(name, segments, separators=separators or "attached")
            after = after if after == PatchedMask(spec) else PatchedMask(spec)
            continue
        patches = _PATCHES_BY_KIND[edit.kind](edit, after, segments)
        if any(_changes_cells(after, patch) for patch in patches):
            after = PatchedMask(after.base, (*after.patches, *patches))
    if after is mask:
        raise MaskError(f"'{'; '.join(map(str, edits))}' does not change the mask.")
    return after


def _drop(edit: Edit, mask: PatchedMask, segments: Segments) -> list[MaskPatch]:
    number = find_segment(edit.names[0], segments)
    if segments[number].kind is SegmentKind.GENERATED:
        raise MaskError("The generated segment cannot be dropped: its rows choose the tokens.")
    spans = _segment_spans(number, segments)
    # Rows before the first span are causal anyway.
    stops = [*(start for start, _ in spans[1:]), OPEN_END]
    others = [(row, stop) for (_, row), stop in zip(spans, stops, strict=True) if row < stop]
    return [MaskPatch(*rows, *keys, False) for keys in spans for rows in others]


def _join(edit: Edit, mask: PatchedMask, segments: Segments) -> list[MaskPatch]:
    first, second = (find_segment(name, segments) for name in edit.names)
    if first == second:
        raise MaskError(f"'{edit}' names one segment twice.")
    both = ((first, second), (second, first))
    return [patch for pair in both for patch in _opening_patches(*pair, segments)]


def _see(edit: Edit, mask: PatchedMask, segments: Segments) -> list[MaskPatch]:
    query, key = (find_segment(name, segments) for name in edit.names)
    if segments[query].stop <= segments[key].start:
        raise MaskError(
            f"{segments[query].label} comes before {segments[key].label}, and a row attends to no "
            "later key.",
            hint=f"Swap the two segments, or use 'drop {segments[query].label}'.",
        )
    patches = _opening_patches(query, key, segments)
    return [replace(patch, is_open=edit.is_open is not False) for patch in patches]


def _opening_patches(query: int, key: int, segments: Segments) -> list[MaskPatch]:
    """Return patches that let segment `query` attend to segment `key`, without later keys."""
    pairs = [(r, k) for r in _segment_spans(query, segments) for k in _segment_spans(key, segments)]
    return [MaskPatch(*rows, *keys, True) for rows, keys in pairs if keys[0] < rows[1]]


def _cell(edit: Edit, mask: PatchedMask, segments: Segments) -> list[MaskPatch]:
    row, key = edit.indices
    if key > row:
        raise MaskError(f"Row {row} comes before key {key}, and a row attends to no later key.")
    cells, is_open = _row_cells(row, mask, segments), edit.is_open
    if is_open is None:
        is_open = not cells[key]
    return [MaskPatch(row, row + 1, key, key + 1, is_open)]


def _row(edit: Edit, mask: PatchedMask, segments: Segments) -> list[MaskPatch]:
    row, is_open = edit.indices[0], edit.is_open
    cells = _row_cells(row, mask, segments)
    if is_open or (is_open is None and not cells.all()):
        return [MaskPatch(row, row + 1, 0, row + 1, True)]
    itself = MaskPatch(row, row + 1, row, row + 1, True)
    return [MaskPatch(row, row + 1, 0, OPEN_END, False), itself]


def _row_cells(row: int, mask: PatchedMask, segments: Segments) -> BoolArray:
    """Return the cells of a row, bool (row + 1,). Raises `MaskError` for a row after the last."""
    if segments and row >= segments[-1].stop:
        raise MaskError(f"There is no row {row}: the last row is {segments[-1].stop - 1}.")
    cells: BoolArray = mask.dense(1, row + 1, q_offset=row)[0]
    return cells


_PATCHES_BY_KIND = {"drop": _drop, "join": _join, "see": _see, "cell": _cell, "row": _row}


def _changes_cells(mask: PatchedMask, patch: MaskPatch) -> bool:
    """Return whether a patch changes a cell; endless rows are checked up to the last region."""
    last = patch.row_stop - 1
    if patch.row_stop == OPEN_END:
        starts = mask.base.starts if isinstance(mask.base, MaskSpec) else ()
        edges = [edge for each in mask.patches for edge in (each.row_start, each.key_stop)]
        last = max((patch.row_start - 1, 0, *starts, *(e for e in edges if e < OPEN_END))) + 1
    for start, stop in row_chunks(last + 1 - patch.row_start):
        first = patch.row_start + start
        cells = mask.dense(stop - start, last + 1, q_offset=first)
        if (cells != apply_patches(cells, [patch], q_offset=first)).any():
            return True
    return False


def with_segment_labels(edit: Edit, segments: Segments) -> Edit:
    """Return the edit with segments named by label. Raises `MaskError` for an unknown segment."""
    if edit.kind == "preset":
        return edit
    labels = tuple(segments[find_segment(name, segments)].label for name in edit.names)
    return replace(edit, names=labels)


def find_segment(name: str, segments: Segments) -> int:
    """Return the number of the segment with this label or number. Raises `MaskError`."""
    key = name.strip().lower()
    labels = [segment.label.lower() for segment in segments]
    if key in labels:
        return labels.index(key)
    if key.isascii() and key.isdecimal() and int(key) < len(segments):
        return int(key)
    near = difflib.get_close_matches(key, labels, 1)
    hint = f"Did you mean '{near[0]}'?" if near else f"The segments are {', '.join(labels)}."
    raise MaskError(f"There is no segment '{name.strip()}'.", hint=hint)


def _segment_spans(number: int, segments: Segments) -> list[tuple[int, int]]:
    """Return the spans of a segment and its separators, merged where they are adjacent."""
    spans: list[tuple[int, int]] = []
    for segment in (s for index, s in enumerate(segments) if number in (index, s.owner)):
        stop = OPEN_END if segment.kind is SegmentKind.GENERATED else segment.stop
        is_adjacent = bool(spans) and spans[-1][1] == segment.start
        spans.append((spans.pop()[0] if is_adjacent else segment.start, stop))
    return spans
