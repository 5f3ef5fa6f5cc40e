"""Mask presets over segments, and the normal form that each of them has.

Every preset is causal and has one normal form, `MaskSpec`: a row of region r attends to the keys
`kv < prefix_stops[r]` and `kv >= local_starts[r]`, as long as `kv <= q`. The torch side builds its
`mask_mod` from the same `MaskSpec`, so the declared and the executed mask share one description.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.errors import MaskError
from flexinspect.records.prompt import Segment, SegmentKind

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]
Segments = Sequence[Segment]

UNREACHABLE = 2**31 - 1  # a local start beyond every key (the largest int32): an empty row

SEPARATOR_MODES = ("attached", "isolated")


class MaskSpec(Struct, frozen=True):
    """A causal mask in normal form.

    Region r covers the rows `starts[r] <= q < starts[r + 1]` (the last region has no end). Row q
    attends to key kv if `kv <= q and (kv < prefix_stops[r] or kv >= local_starts[r])`.
    """

    name: str
    starts: tuple[int, ...]
    prefix_stops: tuple[int, ...]
    local_starts: tuple[int, ...]

    def region(self, q_idx: int) -> int:
        """Return the region of a row."""
        return int(np.searchsorted(self.starts, q_idx, side="right")) - 1

    def intervals(self, q_idx: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the prefix stop and the local start of each row."""
        region = np.searchsorted(self.starts, q_idx, side="right") - 1
        return np.asarray(self.prefix_stops)[region], np.asarray(self.local_starts)[region]

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return the mask, bool of shape (n_q, n_kv), for the rows from `q_offset` on."""
        q_idx = np.arange(q_offset, q_offset + n_q)[:, None]
        kv_idx = np.arange(q_offset + n_q if n_kv is None else n_kv)[None]
        prefix_stop, local_start = self.intervals(q_idx)
        mask: BoolArray = (kv_idx <= q_idx) & ((kv_idx < prefix_stop) | (kv_idx >= local_start))
        return mask


def spec_entries(spec: MaskSpec) -> dict[str, Any]:
    """Return the entries of a declaration that describe a mask; see `declared_spec`."""
    return {"preset": spec.name, **{name: getattr(spec, name) for name in SPEC_FIELDS}}


SPEC_FIELDS = ("starts", "prefix_stops", "local_starts")


def causal() -> MaskSpec:
    """Return the causal mask: every row attends to itself and all positions before it."""
    return MaskSpec("causal", (0,), (0,), (0,))


def preset(name: str, segments: Segments, *, separators: str = "attached") -> MaskSpec:
    """Return the mask of a preset for these segments.

    `separators` is `attached` (a separator belongs to the segment before it) or `isolated` (its
    rows attend to no key while later rows attend to it: empty rows, as in some published code).

    Raises `MaskError` for an unknown preset or separators mode.
    """
    check_preset(name)
    if separators not in SEPARATOR_MODES:
        what = f"--separators {separators} is unknown; use {' or '.join(SEPARATOR_MODES)}."
        raise MaskError(what)
    intervals = [
        (0, UNREACHABLE)
        if segment.kind is SegmentKind.SEPARATOR and separators == "isolated"
        else PRESETS[name](segments, segments[segment.owner])
        for segment in segments
    ]
    return _build_spec(name, [segment.start for segment in segments], intervals)


def declared_spec(declared: Mapping[str, Any]) -> MaskSpec | None:
    """Return the mask of a declaration, None if it describes none (a user's own `mask_mod`)."""
    columns = [declared.get(name) for name in SPEC_FIELDS]
    if not all(isinstance(c, list | tuple) and all(type(n) is int for n in c) for c in columns):
        return None
    starts, prefix_stops, local_starts = (tuple(column or ()) for column in columns)
    is_valid = starts and len(starts) == len(prefix_stops) == len(local_starts) and starts[0] == 0
    if not is_valid or list(starts) != sorted(starts):
        return None
    return MaskSpec(str(declared.get("preset", "declared")), starts, prefix_stops, local_starts)


OWN_MASK_FLAG = "Pass your own mask_mod as --mask package.module:function."


def check_preset(name: str, hint: str = OWN_MASK_FLAG) -> None:
    """Raise `MaskError` with the known presets for an unknown preset.

    Its hint is the preset with the most similar name, or else `hint`.
    """
    if name in PRESETS:
        return
    near = difflib.get_close_matches(name, PRESETS, n=1)
    raise MaskError(
        f"The mask '{name}' is unknown; the presets are {', '.join(PRESETS)}.",
        hint=f"Did you mean {near[0]}?" if near else hint,
    )


Interval = tuple[int, int]  # prefix_stop, local_start: keys below the first and from the second on

_ALL_KEYS: Interval = (0, 0)
_UNRESTRICTED_KINDS = (SegmentKind.CUE, SegmentKind.GENERATED)


def _prefix(*kinds: SegmentKind) -> Callable[[Segments, Segment], Interval]:
    return lambda segments, owner: _prefix_interval(_last_stop(segments, *kinds), owner)


def _anchor_first(segments: Segments, owner: Segment) -> Interval:
    anchors = [i for i, s in enumerate(segments) if s.kind is SegmentKind.PARAPHRASE][:1]
    anchor_stop = max((s.stop for s in segments if s.owner in anchors), default=0)
    prefix_stop = _last_stop(segments, SegmentKind.BOS, SegmentKind.SHARED)
    return _prefix_interval(max(anchor_stop, prefix_stop), owner)


def _document(segments: Segments, owner: Segment) -> Interval:
    bos_stop = _last_stop(segments, SegmentKind.BOS)
    if owner.kind in _UNRESTRICTED_KINDS:
        starts = (s.start for s in segments if s.kind is SegmentKind.PARAPHRASE)
        return bos_stop, max(starts, default=0)
    return _prefix_interval(bos_stop, owner)


PRESETS: dict[str, Callable[[Segments, Segment], Interval]] = {
    "segment-isolation": _prefix(SegmentKind.BOS),
    "shared-prefix": _prefix(SegmentKind.BOS, SegmentKind.SHARED),
    "causal": lambda segments, owner: _ALL_KEYS,
    "anchor-first": _anchor_first,
    "document": _document,
}
"""The keys that a segment attends to, by preset. All segments attend to the BOS: it depends on no
other token, so nothing leaks through it. Rows of the cue and of generated text attend to everything
before them, except in `document`, where they continue the last paraphrase."""


def _last_stop(segments: Segments, *kinds: SegmentKind) -> int:
    return max((segment.stop for segment in segments if segment.kind in kinds), default=0)


def _prefix_interval(prefix_stop: int, owner: Segment) -> Interval:
    if owner.kind in _UNRESTRICTED_KINDS:
        return _ALL_KEYS
    return min(prefix_stop, owner.start), owner.start


def _build_spec(name: str, starts: Sequence[int], intervals: Sequence[Interval]) -> MaskSpec:
    """Merge adjacent segments with the same visible keys, which saves comparisons in the kernel."""
    merged: list[tuple[int, int, int]] = []
    for start, (prefix_stop, local_start) in zip(starts, intervals, strict=True):
        interval = _ALL_KEYS if prefix_stop >= local_start else (prefix_stop, local_start)
        if not merged or merged[-1][1:] != interval:
            merged.append((start if merged else 0, *interval))
    starts, prefix_stops, local_starts = zip(*merged, strict=True) if merged else ((),) * 3
    return MaskSpec(name, starts, prefix_stops, local_starts)
