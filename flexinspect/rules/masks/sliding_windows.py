"""The rule for layers with a sliding window that see keys beyond it.

A custom mask or attention function replaces the model's own, including its window. On texts shorter
than the window nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.declared_vs_executed import call_frame
from flexinspect.rules.masks.mask_views import format_step_layers

WINDOW_LOST = "mask.window-lost"

_MAX_LISTED_ROWS = 64

_WINDOW_QUERY = (
    "SELECT c.layer, c.path, c.backend, c.window, c.kv_len, m.kind, m.rule FROM calls c LEFT JOIN "
    "masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} AND c.branch = {branch} "
    "AND c.step = {step} ORDER BY c.call"
)


class SlidingWindowRule(Rule):
    """Compares the executed mask of a layer with the sliding window that the layer declares."""

    name: ClassVar[str] = "windows"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        WINDOW_LOST: FindingKind(
            Severity.WARNING,
            "a layer sees keys beyond its own sliding window",
            why="The layer was trained to attend within its window. Beyond it, attention is spread "
            "over distances that the layer never saw in training, more so the longer the text.",
            confirm="In the mask panel of this layer, each row should see as many keys as the "
            "window holds. Compare the logits with those of the unpatched model on a longer text.",
            fix="Combine your mask with the window of the layer: `(kv_idx > q_idx - window)`. The "
            "attention function receives it as the keyword argument `sliding_window`.",
            query=_WINDOW_QUERY,
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return a finding for each window with rows that see the first key outside of it."""
        wide: dict[int, list[CallRecord]] = {}
        checked: dict[tuple[Any, ...], list[int]] = {}
        rows: dict[int, list[int]] = {}
        for call in step.calls:
            window = call.window
            if window is None or call.causal is False or step.kv_after <= window:
                continue
            key = (call.mask, window, call.kv_len, call.q_len)
            if key not in checked:
                checked[key] = self._rows_beyond_window(step, call)
            if checked[key]:
                wide.setdefault(window, []).append(call)
                rows.setdefault(window, checked[key])
        return [self._finding(step, window, wide[window], rows[window]) for window in wide]

    def _rows_beyond_window(self, step: StepRecord, call: CallRecord) -> list[int]:
        """Return the positions of rows that see the first key outside of the window."""
        mask, window, frame = self.context.mask(call.mask), call.window, call_frame(step, call)
        if mask is None or mask.cells is None or window is None or call.q_len != step.q_len:
            return []
        cells = mask.cells
        if call.q_len == 1:  # the whole cost of a decode step without findings
            key = frame.q_offset - window - frame.kv_offset
            is_inside = 0 <= key < cells.shape[2] and mask.averaged is None
            return [frame.q_offset] if is_inside and cells[:, -1, key].any() else []
        rows = np.arange(call.q_len)
        keys = frame.q_offset + rows - window - frame.kv_offset
        inside = (keys >= 0) & (keys < cells.shape[2])
        rows, keys = rows[inside], keys[inside]
        cell_rows = np.minimum(rows, cells.shape[1] - 1)
        is_open: BoolArray = np.asarray(cells[:, cell_rows, keys].any(axis=0))
        if mask.averaged is not None:
            averaged: BoolArray = np.asarray(mask.averaged[:, cell_rows].any(axis=0))
            is_open = is_open & ~averaged
        return [int(pos) for pos in frame.q_offset + rows[is_open]]

    def _finding(
        self, step: StepRecord, window: int, calls: Sequence[CallRecord], rows: Sequence[int]
    ) -> Finding:
        layers = {call.layer for call in calls}
        where = format_step_layers(layers, step)
        first = rows[0]
        sentence = (
            f"The sliding window of {where} holds {plural(window, 'key')}, but in step "
            f"{step.step} {plural(len(rows), 'row')} {'sees' if len(rows) == 1 else 'see'} keys "
            f"beyond it; first: {self.context.format_position(first)} sees "
            f"{self.context.format_position(first - window)}."
        )
        return self.finding(
            step,
            WINDOW_LOST,
            sentence,
            layers=layers,
            positions=tuple(rows[:_MAX_LISTED_ROWS]),
            evidence={"window": window, "rows": len(rows), "path": calls[0].path},
            series=WINDOW_LOST,
        )
