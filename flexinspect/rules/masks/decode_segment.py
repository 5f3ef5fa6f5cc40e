"""Finds generated tokens that continue another segment of the prompt than its last one.

Where documents are packed into one row, a mask_mod compares document ids. If these are lengthened
by zeros for the generated tokens, the tokens belong to document 0. Where segments share others, as
paraphrases share a system prompt, the row then sees what a row of that first segment sees.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flexinspect.core.text import join_labels
from flexinspect.masks.mask_presets import BoolArray
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
        self._prompt: dict[int, BoolArray] = {}
        """By layer, the rows of the prompt where it does not consist of such segments."""
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
                if not spans and (rows := find_shared_rows(view)) is not None:
                    self._prompt.update(dict.fromkeys(view.layers, rows))
            self._is_active = any(self._spans.values()) or bool(self._prompt)
            return
        self._is_active = False
        if step.q_len == 1 and step.kv_before:
            yield from self._check_row(step)
            yield from self._check_shared_row(step)
        self._prompt = {}

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

    def _check_shared_row(self, step: StepRecord) -> Findings:
        ids = step.inputs.position_ids if step.inputs is not None else []
        if not self._prompt or not ids or ids[-1] != step.kv_before:
            return  # only a row that continues the text by its position is meant to read its end
        found: dict[tuple[int, int], list[int]] = {}
        for view in mask_views.step_mask_views(step, self.context)[0]:
            for layer in view.layers:
                prompt = self._prompt.get(layer)
                like = find_like_row(prompt, view) if prompt is not None else None
                if like is not None:
                    n_more = int((prompt[-1] & ~prompt[like]).sum()) if prompt is not None else 0
                    found.setdefault((like, n_more), []).append(layer)
        for (like, n_more), layers in found.items():
            newest, last = step.kv_before, step.kv_before - 1
            sentence = (
                f"The first generated row, {self.context.format_position(newest)}, does not see "
                f"the end of the prompt in {format_step_layers(layers, step)}: it sees itself and "
                f"what the row of {self.context.format_position(like)} sees, up to that "
                f"position, but none of the keys {like + 1}-{last}, of which the last row of the "
                f"prompt sees {n_more}. It has the segment of position {like}"
            )
            sentence += (
                ", the first one, as where a table of segment ids is filled up with 0 for new "
                "tokens."
                if self._is_first(layers[0], like)
                else "."
            )
            missed = _Span(like + 1, newest)._asdict()
            evidence = {"like": like, "missed": missed, "n_missed": n_more}
            yield self.finding(step, OTHER_SEGMENT, sentence, layers, evidence, positions=(newest,))

    def _is_first(self, layer: int, like: int) -> bool:
        """Whether the keys up to a row are one segment: all later rows see all or none of them."""
        n_seen = self._prompt[layer][:, : like + 1].sum(axis=1)
        return bool(np.isin(n_seen[like:], (0, like + 1)).all())

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
        evidence = {
            "segments": [span._asdict() for span in spans],
            "own": own._asdict(),
            "seen": [span._asdict() for span in seen],
        }
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


def find_shared_rows(view: StepMaskView) -> BoolArray | None:
    """Return the rows of a prompt, bool (rows, keys), if segments in it begin at unequal distances.

    A segment begins at a row that does not see the one before it. None for masks of a regular
    pattern, such as chunks, blocks with summaries, and dilated ones, for masks without segments,
    and if heads differ.
    """
    cells = view.cells
    n_rows, n_keys = cells.shape[1:]
    if n_rows != n_keys or n_rows < 2 * _MIN_LAST or not (cells == cells[:1]).all():
        return None
    rows: BoolArray = cells[0]
    if view.first_key_pos or not rows.diagonal().all() or np.triu(rows, 1).any():
        return None
    distances = np.diff([*_begins(rows), n_rows])
    return rows if len(distances) > 1 and len({*distances.tolist()}) > 1 else None


def _begins(rows: BoolArray) -> list[int]:
    return [0, *(np.flatnonzero(~rows.diagonal(-1)) + 1).tolist()]


def find_like_row(prompt: BoolArray, view: StepMaskView) -> int | None:
    """Return the earlier row of the prompt whose keys are those of a generated row.

    The generated row has to see itself and not the row before it, while the last row of the prompt
    sees that earlier row's keys and at least two more behind it.
    """
    n, row = len(prompt), view.newest_row
    is_short = view.first_key_pos or view.newest_key != n or not row[n]
    keys = np.flatnonzero(row[:n])
    if is_short or len(keys) < _MIN_LAST or keys[-1] >= n - _MIN_LAST:
        return None
    like = int(keys[-1])
    last = prompt[-1]
    is_like = np.array_equal(prompt[like], row[:n]) and bool(row[like - 1])
    sees_more = bool(last[keys].all()) and int(last[like + 1 : n - 1].sum()) >= 1
    return like if is_like and sees_more else None


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
