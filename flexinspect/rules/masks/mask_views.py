"""The executed masks of a step, with the layers that share each, and helpers to read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from flexinspect.core.text import Positions, capitalize, printable
from flexinspect.masks.mask_presets import BoolArray, MaskSpec
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers

NON_PROMPT_LABELS = ("padding", "before watching")  # of positions outside of the prompt


Calls = Sequence[CallRecord]


class StepMaskView(Struct, frozen=True):
    """The executed mask of some layers in one step.

    `cells` is bool (heads, rows, keys); heads or rows are 1 where all share one. `first_key_pos` is
    the position of key 0, and `newest_key` the index of the newest row's own key.
    """

    fingerprint: str
    layers: tuple[int, ...]
    cells: BoolArray
    first_key_pos: int
    newest_key: int

    @property
    def newest_pos(self) -> int:
        """Position of the newest row."""
        return self.first_key_pos + self.newest_key

    @property
    def newest_row(self) -> BoolArray:
        """The keys that the newest row sees in any head, bool (keys,)."""
        row = self.cells[:, -1]
        return row[0] if len(row) == 1 else np.asarray(row.any(axis=0))

    def visible_positions(self) -> Positions:
        """Return the positions that the newest row sees in any head."""
        return self.first_key_pos + np.flatnonzero(self.newest_row)

    def sees(self, segment: Segment) -> bool:
        """Return whether the newest row sees any key of a segment, in any head."""
        start, stop = (max(pos - self.first_key_pos, 0) for pos in (segment.start, segment.stop))
        return bool(self.cells[:, -1, start:stop].any())

    def block(self, rows: Segment, keys: Segment) -> BoolArray:
        """Return the cells of a segment's rows and another's keys, in any head of a whole step."""
        cells = broadcast_rows(self.cells, rows.stop)
        part = cells[:, rows.start : rows.stop, keys.start : keys.stop]
        return part[0] if len(part) == 1 else np.asarray(part.any(axis=0))


def step_mask_views(step: StepRecord, context: RuleContext) -> tuple[list[StepMaskView], bool]:
    """Return the masks executed in a step, and whether the masks of all its calls are known."""
    calls_of = calls_by_mask(step)
    views = []
    for fingerprint, calls in calls_of.items():
        mask = context.mask(fingerprint)
        if mask is not None and mask.cells is not None:
            # The mask's own offsets do not fit: equal masks of later steps share one record.
            first, layers = max(step.kv_after - mask.kv_len, 0), layers_of(calls)
            newest_key = min(step.kv_after - first, mask.kv_len) - 1
            views.append(StepMaskView(mask.fingerprint, layers, mask.cells, first, newest_key))
    return views, bool(views) and len(views) == len(calls_of)


def calls_by_mask(step: StepRecord) -> dict[str | None, list[CallRecord]]:
    """Return the calls of a step by the fingerprint of their mask."""
    calls: dict[str | None, list[CallRecord]] = {}
    for call in step.calls:
        calls.setdefault(call.mask, []).append(call)
    return calls


def layers_of(calls: Iterable[CallRecord]) -> tuple[int, ...]:
    """Return the layers of calls, ascending."""
    return tuple(sorted({call.layer for call in calls}))


def call_layers(context: RuleContext, calls: Iterable[CallRecord]) -> tuple[int, ...]:
    """Return the layers of calls for a finding; a standalone call belongs to none."""
    return () if context.is_standalone else layers_of(calls)


def format_call_place(context: RuleContext, step: StepRecord, calls: Calls) -> str:
    """Return `Layers 0-2`, or `A standalone call of flex_attention (8 rows, 8 keys)`."""
    if context.is_standalone:
        call = calls[0]
        return f"A standalone call of flex_attention ({call.q_len} rows, {call.kv_len} keys)"
    return capitalize(format_step_layers(layers_of(calls), step))


def format_mask_mod(mask: MaskRecord) -> str:
    """Return the name of the mask_mod of a block mask, for sentences."""
    return printable(mask.mask_mod or "an unnamed mask_mod")


def visited_blocks(mask: MaskRecord) -> BoolArray | None:
    """Return which blocks are in a mask's tables, bool (heads, row blocks, key blocks), or None."""
    if mask.partial is None:
        return None
    return mask.partial if mask.full is None else mask.partial | mask.full


def broadcast_rows(cells: BoolArray, n_rows: int) -> BoolArray:
    """Return cells, bool (heads, rows, keys), with a single row that all share broadcast."""
    if cells.shape[1] == 1 < n_rows:
        return np.broadcast_to(cells, (len(cells), n_rows, cells.shape[2]))
    return cells


def slice_flags(flags: BoolArray, start: int, n: int, *, fill: bool = True) -> BoolArray:
    """Return the flags of n positions from `start`, with `fill` for those after the prompt."""
    inside = flags[start : start + n]
    if len(inside) == n:
        return inside
    return np.concatenate((inside, np.full(n - len(inside), fill)))


def is_sliding_window(positions: Positions, last: int, before: int) -> bool:
    """Return whether a row sees a sliding window: a run of as many keys as the row before it.

    `positions` are those that the row at position `last` sees; the row before it saw `before`.
    """
    if not len(positions) or positions[0] == 0 or len(positions) != before:
        return False
    return bool(positions[-1] == last == positions[0] + len(positions) - 1)


def paraphrase_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments that are paraphrases of each other."""
    return [segment for segment in segments if segment.kind is SegmentKind.PARAPHRASE]


def spec_sees_segment(spec: MaskSpec, pos: int, segment: Segment) -> bool:
    """Return whether a spec opens any key of a segment for the row at a position."""
    region, stop = spec.region(pos), min(segment.stop, pos + 1)
    is_local = stop > max(spec.local_starts[region], segment.start)
    return segment.start < stop and (segment.start < spec.prefix_stops[region] or is_local)


def spec_reads_key(spec: MaskSpec, pos: int, n_rows: int) -> bool:
    """Return whether a spec lets any later row, of `n_rows` rows, see the key at a position."""
    starts, stops = np.asarray(spec.starts), np.asarray([*spec.starts[1:], n_rows])
    later = (np.minimum(stops, n_rows) > pos + 1) & (starts < n_rows)
    sees = (pos < np.asarray(spec.prefix_stops)) | (pos >= np.asarray(spec.local_starts))
    return bool((later & sees).any())
