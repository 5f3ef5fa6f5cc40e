"""Stopping criteria of the program that hold for the prompt alone, so the answer ends at once."""

from __future__ import annotations

from flexinspect.core.text import format_numbers, plural, printable
from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

PROMPT_STOP_EVENT = "stops-at-prompt"
"""The event of a call of `generate` with such a criterion; docs/trace-format.md has its data."""
FINDING = "generate.stops-at-prompt"


class StopsAtPromptRule(Rule):
    """Reports what capture found when it gave a criterion the prompt without the answer."""

    name = "stops_at_prompt"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind != PROMPT_STOP_EVENT:
            return
        data = event.data
        reason = (
            f"it counts the {plural(data['n_prompt'], 'token')} of the prompt as well"
            if data["counts_length"]
            else "it looks at the whole text, and the prompt has what it looks for"
        )
        sentence = (
            f"The stopping criterion {printable(str(data['criterion']))} "
            f"({printable(str(data['place']))}) ended batch {format_numbers('row', data['rows'])} "
            f"after the first generated token, and it holds for the prompt alone: {reason}."
        )
        yield self.finding(event, FINDING, sentence, evidence=data, series=str(data["place"]))
