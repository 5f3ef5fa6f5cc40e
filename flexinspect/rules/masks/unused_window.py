"""A sliding window that the configuration asks for, and that is in none of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import printable
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

UNUSED_WINDOW_EVENT = "unused-window"
"""The event of a first step: `window`, the `layers` that should have it, and the `config`'s class.

It is recorded if use_sliding_window is set, no layer slides, and a new configuration of the same
fields has layers that do.
"""
FINDING = "mask.unused-window"


class UnusedWindowRule(Rule):
    """Reports the window once a text is longer than it."""

    name = "unused_window"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def reset(self) -> None:
        self._data: Mapping[str, Any] | None = None

    def on_step(self, step: StepRecord) -> Findings:
        """Read the event, and wait for rows that the window would cut off."""
        for event in step.events:
            if event.kind == UNUSED_WINDOW_EVENT:
                self._data = event.data
        data = self._data
        if data is None or step.kv_after <= int(data["window"]):
            return
        self._data, layers = None, [int(layer) for layer in data["layers"]]
        sentence = (
            f"The configuration asks for a sliding window of {data['window']} keys "
            f"(use_sliding_window=True), but its layer_types are full_attention in all layers: "
            f"{format_step_layers(layers, step)} attend to the whole text. A new "
            f"{printable(str(data['config']))} with the same fields would have the window there: "
            "layer_types are derived when a configuration is made, and not again when its fields "
            "are set."
        )
        yield self.finding(step, FINDING, sentence, layers, data, series="window")
