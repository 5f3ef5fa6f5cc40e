"""The rule for masks, score_mods and forwards of layers that share the variable of their loop."""

from __future__ import annotations

from flexinspect.core.text import capitalize, printable
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

LATE_BINDING_EVENT = "late-binding"
_MADE = {"score_mod": ("score_mods", "scores"), "forward": ("forwards", "value")}
"""What a loop made, and what each layer gets of the last one."""


class LateBindingRule(Rule):
    """Reports what capture found in the closures of the first step's masks."""

    name = "late_binding"
    needs = (imported.EVENTS,)
    findings = finding_kinds("mask.late-binding")

    def on_step(self, step: StepRecord) -> Findings:
        """Return a finding for each variable that the rules share."""
        for event in step.events:
            if event.kind != LATE_BINDING_EVENT:
                continue
            layers = [int(layer) for layer in event.data["layers"]]
            name, source = printable(event.data["variable"]), printable(event.data["source"])
            what, got = _MADE.get(str(event.data.get("of")), ("rules", "mask"))
            sentence = (
                f"{capitalize(format_step_layers(layers, step))} use {what} that a loop made "
                f"({source}), and all of them see the loop's last value of `{name}` "
                f"({printable(event.data['value'])}): a function looks its variables up when it "
                f"runs, so every layer gets the {got} of the last one."
            )
            yield self.finding(
                step, "mask.late-binding", sentence, layers, event.data, series=f"{source} {name}"
            )
