"""Layers with a sliding window of their own that see keys beyond it.

A mask or attention of one's own replaces the model's, and the window with it; as long as the text
is shorter than the window nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray
from flexinspect.records import CallRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.maskplaces import frame_of
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted
from flexinspect.rules.words import layers as in_layers

WINDOW_LOST = "mask.window-lost"

_QUERY = (
    "SELECT c.layer, c.path, c.backend, c.window, c.kv_len, m.kind, m.rule FROM calls c LEFT JOIN "
    "masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} AND c.branch = {branch} "
    "AND c.step = {step} ORDER BY c.call"
)


class WindowsRule(Rule):
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
            _QUERY,
        ),
    }

    def begin(self, scene: Scene) -> None:
        """Begin with no mask judged."""
        super().begin(scene)
        self._right: set[tuple[Any, ...]] = set()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return the layers whose rows see the key that has just left their window."""
        wide: dict[int, list[CallRecord]] = {}
        rows: dict[int, list[int]] = {}
        for call in step.calls:
            if call.window is None or call.causal is False or call.q_len != step.q_len:
                continue
            if step.kv_after <= call.window:
                continue
            found = self._beyond(step, call)
            if found:
                wide.setdefault(call.window, []).append(call)
                rows.setdefault(call.window, found)
        return [self._finding(step, window, wide[window], rows[window]) for window in wide]

    def _beyond(self, step: StepRecord, call: CallRecord) -> list[int]:
        """Return the positions whose rows see the first key that lies outside of the window."""
        mask, window, frame = self.scene.mask(call.mask), call.window, frame_of(step, call)
        if mask is None or mask.cells is None or window is None:
            return []
        key = (call.mask, window, frame.q_offset, frame.kv_offset)
        if key in self._right:
            return []
        cells = mask.cells
        n_rows = max(call.q_len, 1)
        at = np.arange(n_rows)
        keys = frame.q_offset + at - window - frame.kv_offset
        at, keys = at[keys >= 0], keys[keys >= 0]
        at, keys = at[keys < cells.shape[2]], keys[keys < cells.shape[2]]
        lines = np.minimum(at, cells.shape[1] - 1)
        is_open: BoolArray = cells[:, lines, keys].any(axis=0)
        if mask.averaged is not None:
            is_open = is_open & ~mask.averaged[:, lines].any(axis=0)
        if not is_open.any():
            self._right.add(key)
            return []
        return [int(row) for row in frame.q_offset + at[is_open]]

    def _finding(
        self, step: StepRecord, window: int, calls: Sequence[CallRecord], rows: Sequence[int]
    ) -> Finding:
        layers = {call.layer for call in calls}
        where = in_layers(sorted(layers), len({call.layer for call in step.calls}))
        first = rows[0]
        sentence = (
            f"The sliding window of {where} holds {counted(window, 'key')}, and in step "
            f"{step.step} {counted(len(rows), 'row')} {'sees' if len(rows) == 1 else 'see'} keys "
            f"beyond it; first: {self.scene.position(first)} sees "
            f"{self.scene.position(first - window)}."
        )
        about: dict[str, Any] = {"layers": layers, "positions": tuple(rows[:64])}
        evidence = {"window": window, "rows": len(rows), "path": calls[0].path}
        return self.finding(
            step, WINDOW_LOST, sentence, evidence=evidence, series=WINDOW_LOST, **about
        )


RULE: type[Rule] = WindowsRule
