"""Reads the attention of the newest row of each step, by segment and by token, as 16-bit shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.text import printable
from flexinspect.exports.report import contents
from flexinspect.exports.report.branch_columns import BranchSpan
from flexinspect.exports.report.contents import SHARE_ONE
from flexinspect.masks.attention_row import recorded_check
from flexinspect.panels.attention.row_recompute import (
    RowNotRecordedError,
    StepView,
    load_step_view,
)
from flexinspect.records.prompt import Segment
from flexinspect.trace.queries import lineage

NO_ATTENTION = (
    "Attention is not recorded at this level. Record with --level advanced for the attention by "
    "segment, or with --level extreme for that of every token."
)
NO_TOKEN_ATTENTION = (
    "The attention of single tokens is not recorded at this level. Record with --level extreme."
)
MASS, ENTROPY = "attention.mass", "attention.entropy"


class AttentionReading(Struct, frozen=True):
    """The attention of a branch, as far as it is recorded."""

    by_segment: contents.SegmentAttention | None
    by_token: contents.TokenAttention | None


def read_attention(
    span: BranchSpan,
    segments: Sequence[Segment],
    max_bytes: int,
    progress: Callable[[int], None],
) -> AttentionReading:
    """Read the attention of so many steps, evenly spread, that it takes about `max_bytes`.

    Half of them are for the attention by segment. `progress` receives the number of steps read.
    """
    every = range(span.start, span.stop)
    found = _read_by_segment(span, segments, _spread(every, _segment_bytes(span), max_bytes // 2))
    progress(len(every) // 2)
    tokens = _read_by_token(span, _spread(every, _token_bytes(span), max_bytes // 2), progress)
    return AttentionReading(found, tokens)


def _spread(steps: range, bytes_per_step: int, max_bytes: int) -> range:
    """Return every n-th step, so that they have at most `max_bytes`; none without any bytes."""
    if not bytes_per_step:
        return range(0)
    every = max(-(-len(steps) * bytes_per_step // max(max_bytes, 1)), 1)
    return steps[::every]


def to_shares(values: npt.NDArray[np.floating]) -> contents.Shares:
    """Return shares from 0 to 1 as integers from 0 to `SHARE_ONE`; NaN is 0."""
    scaled = np.rint(np.nan_to_num(np.clip(values, 0.0, 1.0)) * SHARE_ONE)
    found: contents.Shares = scaled.astype(np.uint16)
    return found


# -- by segment -----------------------------------------------------------------------------------


def _segment_bytes(span: BranchSpan) -> int:
    """Return the bytes that a step takes, 0 if the branch has no recorded attention."""
    first = _first_recorded(span, MASS)
    return 0 if first is None or first.ndim != 3 else 2 * first.size + 4 * first[..., 0].size


def _first_recorded(span: BranchSpan, stream: str) -> npt.NDArray[np.floating] | None:
    arrays = (
        span.source.reader.array(span.generation, step, stream, None, span.branch)
        for step in range(span.start, min(span.stop, span.start + 3))
    )
    return next((array for array in arrays if array is not None), None)


def _read_by_segment(
    span: BranchSpan, segments: Sequence[Segment], steps: range
) -> contents.SegmentAttention | None:
    first = _first_recorded(span, MASS)
    if not steps or first is None or first.ndim != 3:
        return None
    shape, kept = first.shape, []
    shares, entropies, failures = [], [], []
    layers: list[int] = []
    for step in steps:
        mass = span.source.reader.array(span.generation, step, MASS, None, span.branch)
        calls = span.source.reader.calls(span.generation, step, span.branch)
        if mass is None or mass.shape != shape or len(calls) != shape[0]:
            continue
        entropy = span.source.reader.array(span.generation, step, ENTROPY, None, span.branch)
        if entropy is None or entropy.shape != shape[:2]:
            entropy = np.full(shape[:2], np.nan)
        layers = layers or [call.layer for call in calls]
        kept.append(step)
        shares.append(to_shares(mass))
        entropies.append(entropy.astype(np.float32))
        failures.append([recorded_check(call).is_failed for call in calls])
    if not kept:
        return None
    return contents.SegmentAttention(
        step=contents.int_column(kept),
        layers=layers,
        labels=_labels(span, segments, shape[2]),
        share=np.stack(shares),
        entropy=np.stack(entropies),
        failed=np.array(failures, np.uint8),
        every=steps.step,
    )


def _labels(span: BranchSpan, segments: Sequence[Segment], n_segments: int) -> list[str]:
    """Return the labels of the segments that were recorded: those of the branch, or a parent's."""
    reader, generation = span.source.reader, span.generation
    family = [
        reader.segments(generation, one) for one, *_ in lineage(reader, generation, span.branch)
    ]
    for own in (segments, *family):
        if len(own) == n_segments:
            return [printable(segment.label) for segment in own]
    return [f"segment {number}" for number in range(1, n_segments + 1)]


# -- by token -------------------------------------------------------------------------------------


def _token_bytes(span: BranchSpan) -> int:
    """Return the bytes that a step takes on average, 0 if no queries and keys are stored."""
    if span.start >= span.stop:
        return 0
    middle = load_step_view(span.source, span.place((span.start + span.stop) // 2))
    stored = {*middle.stored_layers()}
    heads = (call.q_heads for call in middle.calls if call.layer in stored)
    return 2 * sum(heads) * middle.step_row.kv_after


def _read_by_token(
    span: BranchSpan, steps: range, progress: Callable[[int], None]
) -> contents.TokenAttention | None:
    kept: list[int] = []
    first_pos: list[int] = []
    shares: list[contents.Shares] = []
    failures: list[list[bool]] = []
    layers: list[int] = []
    done = len(steps)
    for number, step in enumerate(steps):
        view = load_step_view(span.source, span.place(step))
        own = view.stored_layers()
        layers = layers or own
        if own == layers and (rows := _rows_of_step(view, layers)) is not None:
            kept.append(step)
            first_pos.append(rows[0])
            shares.append(rows[1])
            failures.append(rows[2])
        progress(number * (span.stop - span.start) // (2 * done))
    if not kept:
        return None
    return contents.TokenAttention(
        step=contents.int_column(kept),
        layers=layers,
        first_pos=contents.int_column(first_pos),
        share=shares,
        failed=np.array(failures, np.uint8),
        every=steps.step,
    )


def _rows_of_step(
    view: StepView, layers: Sequence[int]
) -> tuple[int, contents.Shares, list[bool]] | None:
    """Return the first position, the shares (layers, heads, keys), and the layers that failed.

    None if a row cannot be recomputed, or the layers do not have the same heads or keys.
    """
    newest = view.step_row.kv_after - 1
    found, failures, shapes = [], [], set()
    for index, call in enumerate(view.calls):
        if call.layer not in layers:
            continue
        try:
            rows = view.recompute_rows(index, range(call.q_heads), newest)
        except RowNotRecordedError:
            return None
        weights = np.stack([row.weights for row in rows])
        failed = any(row.lse_check.is_failed for row in rows)
        found.append(to_shares(weights))
        failures.append(failed or not np.isfinite(weights).all())
        shapes.add((rows[0].first_pos, weights.shape))
    if len(shapes) != 1 or len(found) != len(layers):
        return None
    return shapes.pop()[0], np.stack(found), failures
