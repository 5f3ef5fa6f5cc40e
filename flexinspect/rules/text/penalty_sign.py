"""Logits processors of the program that scale scores whatever their sign."""

from __future__ import annotations

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

SIGN_EVENT = "penalty-sign"
"""The event of a call of `generate` with such a processor; docs/trace-format.md has its data."""
FINDING = "generate.penalty-sign"


class PenaltySignRule(Rule):
    """Reports a processor that made some tokens of the text likelier and others less likely."""

    name = "penalty_sign"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind != SIGN_EVENT:
            return
        data = event.data
        factor = float(data["factor"])
        n_negative, n_positive = int(data["n_negative"]), int(data["n_positive"])
        how = f"divides the scores of tokens of the text by {1 / factor:.3g}"
        likelier, less_likely = n_negative, n_positive
        if factor > 1:
            how = f"multiplies the scores of tokens of the text by {factor:.3g}"
            likelier, less_likely = n_positive, n_negative
        effect = f"{plural(likelier, 'token')} became more likely"
        if less_likely:
            effect += f" and {less_likely} less"
        sentence = (
            f"The logits processor {printable(str(data['processor']))} "
            f"({printable(str(data['place']))}) {how} whatever their sign: in batch row "
            f"{data['row']} of step {data['step']}, {effect}."
        )
        yield self.finding(event, FINDING, sentence, evidence=data, series=str(data["place"]))
