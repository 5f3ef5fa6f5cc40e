"""Pictures of masks, made by hand from numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import BoolArray, preset
from flexinspect.masks.viewport import CLOSED, OPEN, States
from flexinspect.records.prompt import Segment, SegmentKind


def paraphrase_segments(
    n_paraphrases: int, n_tokens: int, n_separators: int, n_generated: int
) -> tuple[Segment, ...]:
    """Return the segments of paraphrases with separators between them, then generated tokens."""
    segments: list[Segment] = []
    at = 0
    for number in range(1, n_paraphrases + 1):
        owner = len(segments)
        kind = SegmentKind.PARAPHRASE
        segments.append(Segment(at, at + n_tokens, f"paraphrase {number}", kind, owner))
        at += n_tokens
        if number < n_paraphrases and n_separators:
            stop, label = at + n_separators, f"separator {number}"
            segments.append(Segment(at, stop, label, SegmentKind.SEPARATOR, owner))
            at = stop
    stop, kind = at + n_generated, SegmentKind.GENERATED
    return (*segments, Segment(at, stop, "generated", kind, len(segments)))


def full_picture(
    cells: BoolArray,
    segments: Sequence[Segment] = (),
    *,
    title: str = "segment-isolation",
    words: Mapping[int, str] | None = None,
    states: States | None = None,
) -> MaskPicture:
    """Return a picture with one cell per cell of the mask."""
    n_rows, n_keys = cells.shape
    generated = [s.start for s in segments if s.kind is SegmentKind.GENERATED]
    return MaskPicture(
        title=title,
        states=np.where(cells, OPEN, CLOSED).astype(np.uint8) if states is None else states,
        row_edges=np.arange(n_rows + 1, dtype=np.int32),
        key_edges=np.arange(n_keys + 1, dtype=np.int32),
        empty_rows=~cells.any(axis=1),
        unseen_keys=~cells.any(axis=0),
        segments=tuple(segments),
        first_generated=generated[0] if generated else None,
        words=words or {},
    )


def isolation_picture(
    n_paraphrases: int = 3,
    n_tokens: int = 15,
    n_separators: int = 1,
    n_generated: int = 8,
    *,
    separators: str = "attached",
    words: Mapping[int, str] | None = None,
) -> MaskPicture:
    """Return the picture of segment isolation: the seed's small preset by default."""
    segments = paraphrase_segments(n_paraphrases, n_tokens, n_separators, n_generated)
    spec = preset("segment-isolation", segments, separators=separators)
    return full_picture(spec.dense(segments[-1].stop), segments, words=words)
