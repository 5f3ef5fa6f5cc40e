"""Stopping criteria of the program that end rows of a batch because of the ids of another row."""

from __future__ import annotations

from flexinspect.core.text import format_numbers, printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

STOPPING_EVENT = "stopping-rows"
"""The event of a call of `generate` with such a criterion; docs/trace-format.md has its data."""
FINDING = "generate.stopping-rows"


class StoppingRowsRule(Rule):
    """Reports what capture found when it gave rows of a batch the ids of others."""

    name = "stopping_rows"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind != STOPPING_EVENT:
            return
        data = event.data
        rows, sources = format_numbers("row", data["rows"]), format_numbers("row", data["sources"])
        who = f"The stopping criterion {printable(str(data['criterion']))} "
        who += f"({printable(str(data['place']))})"
        it = "it" if len(data["rows"]) == 1 else "them"
        if data["is_end"]:
            sentence = (
                f"{who} ended batch {rows} at step {data['step']} because of the ids of batch "
                f"{sources}: with the ids of such a row in all rows it does not end that row, and "
                f"nothing else ended {it}."
            )
        else:
            sentence = (
                f"{who} did not end batch {rows} at step {data['step']} because of the ids of "
                f"batch {sources}: with the ids of such a row in all rows it ends that row. The "
                "tokens after that step have to be cut off."
            )
        if data["same_prompt"]:
            sentence += " These rows have one prompt, so it may be meant."
        is_note = data["same_prompt"] or not data["is_end"]
        severity = Severity.NOTE if is_note else None
        series = f"{data['place']} {data['is_end']}"
        yield self.finding(
            event, FINDING, sentence, evidence=data, severity=severity, series=series
        )
