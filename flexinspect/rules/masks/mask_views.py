"""The executed masks of a step, with the layers that share each, and helpers to read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexinspect.core.text import Positions, format_layers
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext

NON_PROMPT_LABELS = ("padding", "before watching")
"""Labels of segments that the capture adds for positions outside of the prompt."""


@dataclass(frozen=True, slots=True)
class StepMaskView:
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
        """Return the cells of one segment's rows and another's keys, in any head.

        The step must compute the whole sequence.
        """
        cells = broadcast_rows(self.cells, rows.stop)
        part = cells[:, rows.start : rows.stop, keys.start : keys.stop]
        return part[0] if len(part) == 1 else np.asarray(part.any(axis=0))


def step_mask_views(step: StepRecord, context: RuleContext) -> tuple[list[StepMaskView], bool]:
    """Return the masks executed in a step, and whether the masks of all its calls are known."""
    layers: dict[str | None, list[int]] = {}
    for call in step.calls:
        layers.setdefault(call.mask, []).append(call.layer)
    views = []
    for fingerprint, which in layers.items():
        mask = context.mask(fingerprint)
        if fingerprint is None or mask is None or mask.cells is None:
            continue
        # The mask's own offsets do not fit: equal masks of later steps share one record.
        first_key_pos = max(step.kv_after - mask.kv_len, 0)
        views.append(
            StepMaskView(
                fingerprint=fingerprint,
                layers=tuple(sorted(set(which))),
                cells=mask.cells,
                first_key_pos=first_key_pos,
                newest_key=min(step.kv_after - first_key_pos, mask.kv_len) - 1,
            )
        )
    return views, bool(views) and len(views) == len(layers)


def broadcast_rows(cells: BoolArray, n_rows: int) -> BoolArray:
    """Return cells, bool (heads, rows, keys), with a single row that all share broadcast."""
    if cells.shape[1] == 1 < n_rows:
        return np.broadcast_to(cells, (len(cells), n_rows, cells.shape[2]))
    return cells


def format_step_layers(layers: Iterable[int], step: StepRecord) -> str:
    """Return `layer 3`, `layers 0-2` or `all 8 layers`, of the layers with calls in a step."""
    return format_layers(sorted(set(layers)), len({call.layer for call in step.calls}))


def is_suffix(positions: Positions, last: int) -> bool:
    """Return whether positions are a contiguous run that ends at `last`."""
    return len(positions) > 0 and positions[-1] == last == positions[0] + len(positions) - 1


def is_sliding_window(positions: Positions, last: int, before: int) -> bool:
    """Return whether a row sees a sliding window: a run of as many keys as the row before it.

    `positions` are those that the row at position `last` sees; the row before it saw `before`.
    """
    return is_suffix(positions, last) and positions[0] > 0 and len(positions) == before


def paraphrase_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments that are paraphrases of each other."""
    return [segment for segment in segments if segment.kind is SegmentKind.PARAPHRASE]


def spec_sees_segment(spec: MaskSpec, pos: int, segment: Segment) -> bool:
    """Return whether a spec opens any key of a segment for the row at a position."""
    region = spec.region(pos)
    stop = min(segment.stop, pos + 1)
    if segment.start >= stop:
        return False
    return segment.start < spec.prefix_stops[region] or stop > max(
        spec.local_starts[region], segment.start
    )


def spec_reads_key(spec: MaskSpec, pos: int, n_rows: int) -> bool:
    """Return whether a spec lets any later row, of `n_rows` rows, see the key at a position."""
    starts, stops = np.asarray(spec.starts), np.asarray([*spec.starts[1:], n_rows])
    later = (np.minimum(stops, n_rows) > pos + 1) & (starts < n_rows)
    return bool(
        (
            later & ((pos < np.asarray(spec.prefix_stops)) | (pos >= np.asarray(spec.local_starts)))
        ).any()
    )


def segment_labels(segments: Sequence[Segment]) -> list[str]:
    """Return the labels of segments."""
    return [segment.label for segment in segments]
