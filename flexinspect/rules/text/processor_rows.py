"""Logits processors of the program that judge rows of a batch by another row."""

from __future__ import annotations

from flexinspect.core.text import format_numbers, plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

PROCESSOR_EVENT = "processor-rows"
"""The event of a call of `generate` with such a processor; docs/trace-format.md has its data."""
FINDING = "generate.processor-rows"


class ProcessorRowsRule(Rule):
    """Reports what capture found when it called a processor on single rows."""

    name = "processor_rows"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind != PROCESSOR_EVENT:
            return
        data = event.data
        rows, source = [int(row) for row in data["rows"]], data["source"]
        if source is None:
            yield self._by_scores(event, rows)
            return
        gets, its = ("it gets", "its") if len(rows) == 1 else ("they get", "their")
        sentence = (
            f"The logits processor {printable(str(data['processor']))} "
            f"({printable(str(data['place']))}) judges batch {format_numbers('row', rows)} by the "
            f"ids of batch row {source}: alone, {gets} other scores, and with {its} ids in the "
            f"place of those of batch row {source} the same as alone (step {data['step']})."
        )
        series = f"{data['place']}"
        yield self.finding(event, FINDING, sentence, evidence=data, series=series)

    def _by_scores(self, event: EventRecord, rows: list[int]) -> Finding:
        data = event.data
        sentence = (
            f"The logits processor {printable(str(data['processor']))} "
            f"({printable(str(data['place']))}) judges batch {format_numbers('row', rows)} by the "
            f"scores of other rows: in step {data['step']} batch row {rows[0]} keeps "
            f"{plural(int(data['kept']), 'token')}, but {int(data['kept_alone'])} alone. It may "
            "take a maximum, a sum or a threshold over the whole batch."
        )
        series = f"{data['place']}"
        return self.finding(event, FINDING, sentence, evidence=data, series=series)
