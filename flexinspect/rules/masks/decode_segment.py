"""Finds generated tokens that continue another segment of the prompt than its last one.

Where documents are packed into one row, a mask_mod compares document ids. If these are lengthened
by zeros for the generated tokens, the tokens belong to document 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flexinspect.core.text import join_labels
from flexinspect.masks.algebra import BoolArray
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView

OTHER_SEGMENT = "decode.other-segment"
_MIN_LAST = 2  # rows of the last segment; a single one may be a border of chunks
_MAX_NAMES = 3


class _Span(NamedTuple):
    """Positions `start <= pos < stop` of a segment, as the prompt's mask has it."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if self.stop - self.start > 1 else f"{self.start}"


_Spans = tuple[_Span, ...]


class DecodeSegmentRule(Rule):
    """Compares the first decode row with the segments that the mask of the prompt consists of."""

    name = "decode_segment"
    needs = (imported.MASKS,)
    findings = finding_kinds(OTHER_SEGMENT)

    def reset(self) -> None:
        self._spans: dict[int, _Spans] = {}  # by layer
        declared = self.context.declared_spec is not None or self.context.has_custom_mask_mod
        self._is_active = not declared  # those masks are compared with the declared one

    def on_step(self, step: StepRecord) -> Findings:
        """Read the segments of the first step, and check the step after it."""
        if not self._is_active:
            return
        if not step.step and not step.kv_before and step.q_len > _MIN_LAST:
            views, _ = mask_views.step_mask_views(step, self.context)
            for view in views:
                spans = find_spans(view.cells) if not view.first_key_pos else ()
                self._spans.update(dict.fromkeys(view.layers, spans))
            self._is_active = any(self._spans.values())
            return
        self._is_active = False
        if step.q_len == 1 and step.kv_before:
            yield from self._check_row(step)

    def _check_row(self, step: StepRecord) -> Findings:
        found: dict[tuple[_Spans, _Spans], list[int]] = {}
        for view in mask_views.step_mask_views(step, self.context)[0]:
            for layer in view.layers:
                spans = self._spans.get(layer, ())
                seen = _find_seen(view, spans) if spans else ()
                if seen and not _continues(step, seen):
                    found.setdefault((spans, seen), []).append(layer)
        for (spans, seen), layers in found.items():
            yield self._finding(step, spans, seen, layers)

    def _finding(self, step: StepRecord, spans: _Spans, seen: _Spans, layers: list[int]) -> Any:
        own, names = spans[-1], [f"all of {span}" for span in seen[:_MAX_NAMES]]
        if len(seen) > _MAX_NAMES:
            names.append(f"{len(seen) - _MAX_NAMES} more")
        sentence = (
            f"The first generated row, {self.context.format_position(step.kv_before)}, continues "
            f"another segment in {format_step_layers(layers, step)}: the mask of the prompt has "
            f"{len(spans)} segments that do not see each other, of which the last is {own}; this "
            f"row sees {join_labels(names)}, but none of the keys {own}"
        )
        if seen == spans[:1]:
            sentence += (
                ". It has the first segment's id, as where ids are padded with 0 for new tokens"
            )
        evidence = {"segments": [list(span) for span in spans], "own": list(own)}
        evidence["seen"] = [list(span) for span in seen]
        positions = (step.kv_before,)
        return self.finding(
            step, OTHER_SEGMENT, f"{sentence}.", layers, evidence, positions=positions
        )


def find_spans(cells: BoolArray) -> tuple[_Span, ...]:
    """Return the segments of a mask, bool (heads, rows, keys), whose rows see only their own.

    Every row has to see exactly the keys from the beginning of its segment to itself, in all heads:
    windows, sinks, shared prefixes and dilated masks have no segments, nor has a mask of only one.
    Rows of padding at the beginning may see nothing.
    """
    n_rows, n_keys = cells.shape[1:]
    if n_rows != n_keys or not (cells == cells[:1]).all():
        return ()
    rows, position = cells[0], np.arange(n_rows)
    n_pads = int(rows.any(axis=1).argmax())
    first = rows.argmax(axis=1)
    first[:n_pads] = position[:n_pads] + 1  # sees nothing
    expected = (position >= first[:, None]) & (position <= position[:, None])
    begins = first == position
    is_split = begins[n_pads] and (begins[n_pads + 1 :] | (np.diff(first[n_pads:]) == 0)).all()
    if not is_split or not np.array_equal(rows, expected):
        return ()
    edges = [*np.flatnonzero(begins).tolist(), n_rows]
    spans = tuple(_Span(start, stop) for start, stop in pairwise(edges))
    is_cut = len(spans) > 1 and spans[-1].stop - spans[-1].start >= _MIN_LAST
    return spans if is_cut and len(spans) <= n_rows // 2 else ()


def _find_seen(view: StepMaskView, spans: _Spans) -> _Spans:
    """Return the segments that a row sees completely, if it sees itself and not the last one."""
    row, own = view.newest_row, spans[-1]
    if view.first_key_pos or not row[view.newest_key] or row[own.start : own.stop].any():
        return ()
    seen = tuple(span for span in spans[:-1] if row[span.start : span.stop].all())
    n_seen = sum(span.stop - span.start for span in seen)
    return seen if n_seen == np.count_nonzero(row[: own.start]) else ()


def _continues(step: StepRecord, seen: _Spans) -> bool:
    """Whether the row has the position id that continues what it sees: then it is meant to."""
    ids = step.inputs.position_ids if step.inputs is not None else []
    return bool(ids) and ids[-1] == sum(span.stop - span.start for span in seen)
