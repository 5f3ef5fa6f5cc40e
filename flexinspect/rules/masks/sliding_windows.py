"""Layers with a sliding window of their own that see keys beyond it.

A mask or attention of one's own replaces the model's, and the window with it; as long as the text
is shorter than the window nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers as in_layers
from flexinspect.core.text import plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.declared_vs_executed import call_frame

WINDOW_LOST = "mask.window-lost"

_WINDOW_QUERY = (
    "SELECT c.layer, c.path, c.backend, c.window, c.kv_len, m.kind, m.rule FROM calls c LEFT JOIN "
    "masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} AND c.branch = {branch} "
    "AND c.step = {step} ORDER BY c.call"
)


class SlidingWindowRule(Rule):
    """Compares the executed mask of a layer with the sliding window that the layer states."""

    name: ClassVar[str] = "windows"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        WINDOW_LOST: FindingKind(
            Severity.WARNING,
            "a layer sees keys beyond its own sliding window",
            "The layer was trained to see its window alone; with more keys its weights are spread "
            "over distances that it never met, and the more so the longer the text.",
            "In the mask panel of this layer rows should see as many keys as the window holds; "
            "compare the logits with those of the unpatched model on a text longer than it.",
            "Join the layer's window with your mask: `(kv_idx > q_idx - window)`, with "
            "`sliding_window` from the keyword arguments of the attention function, or from the "
            "layer.",
            _WINDOW_QUERY,
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return the layers whose rows see the key that has just left their window."""
        wide: dict[int, list[CallRecord]] = {}
        judged: dict[tuple[Any, ...], list[int]] = {}
        rows: dict[int, list[int]] = {}
        for call in step.calls:
            window = call.window
            if window is None or call.causal is False or step.kv_after <= window:
                continue
            key = (call.mask, window, call.kv_len, call.q_len)
            if key not in judged:
                judged[key] = self._rows_beyond_window(step, call)
            if judged[key]:
                wide.setdefault(window, []).append(call)
                rows.setdefault(window, judged[key])
        return [self._finding(step, window, wide[window], rows[window]) for window in wide]

    def _rows_beyond_window(self, step: StepRecord, call: CallRecord) -> list[int]:
        """Return the positions whose rows see the first key that lies outside of the window."""
        mask, window, frame = self.context.mask(call.mask), call.window, call_frame(step, call)
        if mask is None or mask.cells is None or window is None or call.q_len != step.q_len:
            return []
        cells = mask.cells
        if call.q_len == 1:  # this is what a healthy decode step costs
            gone = frame.q_offset - window - frame.kv_offset
            is_inside = 0 <= gone < cells.shape[2] and mask.averaged is None
            return [frame.q_offset] if is_inside and cells[:, -1, gone].any() else []
        at = np.arange(call.q_len)
        keys = frame.q_offset + at - window - frame.kv_offset
        at, keys = at[keys >= 0], keys[keys >= 0]
        at, keys = at[keys < cells.shape[2]], keys[keys < cells.shape[2]]
        lines = np.minimum(at, cells.shape[1] - 1)
        is_open: BoolArray = np.asarray(cells[:, lines, keys].any(axis=0))
        if mask.averaged is not None:
            averaged: BoolArray = np.asarray(mask.averaged[:, lines].any(axis=0))
            is_open = is_open & ~averaged
        return [int(row) for row in frame.q_offset + at[is_open]]

    def _finding(
        self, step: StepRecord, window: int, calls: Sequence[CallRecord], rows: Sequence[int]
    ) -> Finding:
        layers = {call.layer for call in calls}
        where = in_layers(sorted(layers), len({call.layer for call in step.calls}))
        first = rows[0]
        sentence = (
            f"The sliding window of {where} holds {plural(window, 'key')}, and in step "
            f"{step.step} {plural(len(rows), 'row')} {'sees' if len(rows) == 1 else 'see'} keys "
            f"beyond it; first: {self.context.format_position(first)} sees "
            f"{self.context.format_position(first - window)}."
        )
        about: dict[str, Any] = {"layers": layers, "positions": tuple(rows[:64])}
        evidence = {"window": window, "rows": len(rows), "path": calls[0].path}
        return self.finding(
            step, WINDOW_LOST, sentence, evidence=evidence, series=WINDOW_LOST, **about
        )
