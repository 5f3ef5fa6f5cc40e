"""Logits processors and stopping criteria that begin a call with the state of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

KEPT_EVENT = "kept-state"
"""The event of a call of `generate` with such an object; docs/trace-format.md has its data."""
FINDING = "generate.kept-state"
_MAX_NAMES = 4


class KeptStateRule(Rule):
    """Reports what capture found when it began an object anew beside the program's own."""

    name = "kept_state"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a call of `generate`."""
        if event.kind != KEPT_EVENT:
            return
        data = event.data
        states = [
            f"{printable(str(one['name']))} is {printable(str(one['now']))}, and was "
            f"{printable(str(one['first']))} at the start of the first call"
            for one in data["carried"][:_MAX_NAMES]
        ]
        sentence = (
            f"The {data['kind']} {printable(str(data['name']))} ({printable(str(data['place']))}) "
            f"begins call {data['call']} of generate with what an earlier call left: "
            f"{'; '.join(states)}. {_effect(data)}"
        )
        if data["is_continued"]:
            sentence += " The prompt has what that call generated, so it may be meant."
        elif data["is_memory"]:
            sentence += " If it is not meant to remember other answers, reset it."
        severity = Severity.NOTE if data["is_continued"] or data["is_meant"] else None
        yield self.finding(
            event, FINDING, sentence, evidence=data, severity=severity, series=str(data["place"])
        )


def _effect(data: Mapping[str, Any]) -> str:
    """Return what the object does otherwise if it begins as in the first call."""
    row, step = data["row"], data["step"]
    if "is_end" in data:
        if data["is_end"]:
            at = data["anew_at"]
            anew = "does not end it" if at is None else f"ends it at step {at}"
            return f"It ended batch row {row} at step {step}; begun anew, it {anew}."
        return f"It did not end batch row {row} at step {step}; begun anew, it does."
    ids, kept, best = data["ids"], data["kept"], data["best"]
    sentence = (
        f"Begun anew, it gives other scores at step {step}: {data['n_scores']} of "
        f"{data['vocabulary']} differ in batch row {row}, such as that of token {ids[0]} "
        f"({data['anew'][0]}, not {kept[0]})"
    )
    if best[0] != best[1]:
        sentence += f", and the best token is {best[1]}, not {best[0]}"
    return f"{sentence}."
