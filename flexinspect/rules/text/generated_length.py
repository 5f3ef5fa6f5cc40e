"""The number of new tokens that `generate` returned, against the number it was asked for."""

from __future__ import annotations

from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

LENGTH_EVENT = "more-than-asked"
"""The event of a call that returned more than `max_new_tokens`: "asked" and "produced"."""
FINDING = "text.more-than-asked"


class GeneratedLengthRule(Rule):
    """Finds calls of `generate` that returned more new tokens than they were asked for."""

    name = "generated_length"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind == LENGTH_EVENT:
            asked, produced = event.data.get("asked"), event.data.get("produced")
            sentence = (
                f"generate returned {produced} new tokens, and was asked for at most {asked}."
            )
            yield self.finding(event, FINDING, sentence, evidence=event.data, series="length")
