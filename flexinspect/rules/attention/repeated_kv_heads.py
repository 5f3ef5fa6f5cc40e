"""Reports KV heads that a program repeated as a whole for grouped-query attention."""

from __future__ import annotations

from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

KEYS_TILED_EVENT = "keys-tiled"


class RepeatedKVHeadsRule(Rule):
    """Reports keys that were repeated as a whole, not head by head, for several query heads."""

    name = "repeated_kv_heads"
    needs = (imported.EVENTS,)
    handles_standalone_calls = True
    findings = finding_kinds("attention.keys-tiled")

    def on_step(self, step: StepRecord) -> Findings:
        """Return a finding for each event about repeated keys."""
        for event in step.events:
            if event.kind != KEYS_TILED_EVENT:
                continue
            layers = [int(layer) for layer in event.data["layers"]]
            sentence = (
                f"In {format_step_layers(layers, step)} the keys of {event.data['q_heads']} "
                "query heads were repeated as a whole (repeat), not head by head "
                "(repeat_interleave): query head 1 reads the keys of another group than its "
                "neighbour, query head 0."
            )
            kind, data = "attention.keys-tiled", event.data
            yield self.finding(step, kind, sentence, layers, data, head=1, series="tiled")
