"""The rule for invariants that were learnt from good runs, and that a run breaks."""

from __future__ import annotations

from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

BROKEN_EVENT = "broken-invariant"
"""Event of a run that was judged by learnt invariants: one for each that it breaks."""
FINDING_ID = "training.broken-invariant"


class InvariantRule(Rule):
    """Reports each learnt invariant that the run breaks, with the learnt bound."""

    name = "invariants"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING_ID)

    def on_event(self, event: EventRecord) -> Findings:
        """Turn a violation into a finding."""
        if event.kind == BROKEN_EVENT:
            facts = {name: value for name, value in event.data.items() if value not in (None, "")}
            series = "/".join(str(event.data.get(name)) for name in ("kind", "subject", "other"))
            yield self.finding(event, FINDING_ID, event.text, evidence=facts, series=series)
