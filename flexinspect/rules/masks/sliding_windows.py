"""The rule for layers with a sliding window that see keys beyond it.

A custom mask or attention function replaces the model's own, including its window. On texts shorter
than the window nothing differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.declared_vs_executed import call_frame
from flexinspect.rules.masks.mask_views import layers_of

WINDOW_LOST = "mask.window-lost"


class SlidingWindowRule(Rule):
    """Compares the executed mask of a layer with the sliding window that the layer declares."""

    name: ClassVar[str] = "windows"
    findings = finding_kinds(WINDOW_LOST)

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
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
        for window, calls in wide.items():
            yield self._window_finding(step, window, calls, rows[window])

    def _rows_beyond_window(self, step: StepRecord, call: CallRecord) -> list[int]:
        """Return the positions of rows that see the first key outside of the window."""
        mask, window, frame = self.context.mask(call.mask), call.window, call_frame(step, call)
        if mask is None or mask.cells is None or window is None or call.q_len != step.q_len:
            return []
        cells = mask.cells
        if call.q_len == 1:  # the whole cost of a decode step without findings
            key = frame.q_offset - window - frame.kv_offset
            is_inside = 0 <= key < cells.shape[2] and mask.uniform_rows is None
            return [frame.q_offset] if is_inside and cells[:, -1, key].any() else []
        rows = np.arange(call.q_len)
        keys = frame.q_offset + rows - window - frame.kv_offset
        inside = (keys >= 0) & (keys < cells.shape[2])
        rows, keys = rows[inside], keys[inside]
        cell_rows = np.minimum(rows, cells.shape[1] - 1)
        is_open: BoolArray = np.asarray(cells[:, cell_rows, keys].any(axis=0))
        if mask.uniform_rows is not None:
            averaged: BoolArray = np.asarray(mask.uniform_rows[:, cell_rows].any(axis=0))
            is_open = is_open & ~averaged
        return [int(pos) for pos in frame.q_offset + rows[is_open]]

    def _window_finding(
        self, step: StepRecord, window: int, calls: Sequence[CallRecord], rows: Sequence[int]
    ) -> Finding:
        layers = layers_of(calls)
        sentence = (
            f"The sliding window of {format_step_layers(layers, step)} holds "
            f"{plural(window, 'key')}, but in step {step.step} {plural(len(rows), 'row')} "
            f"{'sees' if len(rows) == 1 else 'see'} keys beyond it; first: "
            f"{self.context.format_position(rows[0])} sees "
            f"{self.context.format_position(rows[0] - window)}."
        )
        return self.finding(
            step,
            WINDOW_LOST,
            sentence,
            layers=layers,
            positions=rows,
            evidence={"window": window, "rows": len(rows), "path": calls[0].path},
            series=WINDOW_LOST,
        )
