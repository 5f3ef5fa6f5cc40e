"""Checks the record itself: failed LSE checks, missing layers, false attention weights.

These findings do not mean that the program is wrong. They show where the record, or what a program
uses as attention weights, differs from what ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import format_layers, printable
from flexinspect.masks.attention_row import LSE_TOLERANCE, recorded_check
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import OWN_FUNCTION, CallRecord, EventRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

_FAILURE_EVENTS = ("hook-disabled", "rule-disabled", "step-not-recorded")
_NOT_FOLLOWED_EVENT, _UNSEEN_EVENT = "generate-not-followed", "not-recorded"


class ObserverRule(Rule):
    """Reports where the record differs from what ran, or is incomplete."""

    name = "observer"
    needs = (imported.EVENTS,)
    handles_standalone_calls = True
    findings = finding_kinds("observer.check-failed", "observer.incomplete", "observer.not-weights")

    def reset(self) -> None:
        self._expected: set[int] = set()
        self._is_followed = True

    def on_step(self, step: StepRecord) -> Findings:
        """Check the LSE checks, the layers that were captured, and the events of a step."""
        # A step without a fault costs only these two lines.
        failed = [c for c in step.calls if c.lse_error is not None and c.lse_error > LSE_TOLERANCE]
        seen = {call.layer for call in step.calls}
        if failed:
            yield from self._report_checks(step, failed)
        if step.events:
            yield from self._check_events(step)
        if seen != self._expected:
            yield from self._check_layers(step, seen)

    def on_event(self, event: EventRecord) -> Findings:
        """Report failures outside a recorded step."""
        if event.kind in _FAILURE_EVENTS:
            yield self._incomplete_finding(event, event, {"event": event.kind, **event.data})

    def _report_checks(self, step: StepRecord, failed: list[CallRecord]) -> Findings:
        """Report LSE checks above the panel's tolerance; NaN is reported by the numbers rule."""
        checks = [(call.lse_error or 0.0, recorded_check(call).tolerance, call) for call in failed]
        bad = [check for check in checks if check[0] > check[1]]
        if not bad:
            return
        value, tolerance, worst = max(bad, key=lambda check: check[0])
        which = sorted({call.layer for _, _, call in bad})
        where = "In a standalone call"
        if not self.context.is_standalone:
            where = f"In {format_step_layers(which, step)}, step {step.step},"
        sentence = (
            f"{where} the record is not what ran: recomputed under the recorded mask, the newest "
            f"row's {'output' if worst.check_kind == 'output' else 'row sum'} is off by "
            f"{value:.2g} (tolerance {tolerance:g}, path {worst.path}, {worst.dtype})."
        )
        evidence = {"check_error": value, "tolerance": tolerance, "kind": worst.check_kind}
        series = ",".join(map(str, which))
        # What a function of the program masks by itself is not recorded, which is no fault of it.
        is_own = all(call.path == OWN_FUNCTION for _, _, call in bad)
        severity = Severity.NOTE if is_own else Severity.WARNING
        yield self.finding(
            step,
            "observer.check-failed",
            sentence,
            which,
            evidence,
            severity=severity,
            series=series,
        )

    def _check_events(self, step: StepRecord) -> Findings:
        no_weights = [event for event in step.events if event.kind == "not-attention-weights"]
        if no_weights:
            layers = {int(event.data.get("layer", 0)) for event in no_weights}
            more = f" (and so did {len(layers) - 1} more layers)" if len(layers) > 1 else ""
            text, evidence = printable(no_weights[0].text).rstrip("."), no_weights[0].data
            id_, sentence = "observer.not-weights", f"In step {step.step}: {text}{more}."
            series = "not-weights"
            yield self.finding(step, id_, sentence, evidence=evidence, layers=layers, series=series)
        for event in step.events:
            if event.kind == _NOT_FOLLOWED_EVENT:
                self._is_followed = False
            if event.kind == _UNSEEN_EVENT and self._expected:
                continue  # `_check_layers` names the layers themselves
            if event.kind in (*_FAILURE_EVENTS, _NOT_FOLLOWED_EVENT, _UNSEEN_EVENT):
                yield self._incomplete_finding(step, event, {"event": event.kind})

    def _incomplete_finding(
        self, place: StepRecord | EventRecord, event: EventRecord, evidence: Mapping[str, Any]
    ) -> Finding:
        options: dict[str, Any] = {"severity": Severity.NOTE, "series": event.kind}
        if event.kind in _FAILURE_EVENTS:
            options = {"severity": Severity.WARNING, "series": event.text}
        text = printable(event.text)
        return self.finding(place, "observer.incomplete", text, evidence=evidence, **options)

    def _check_layers(self, step: StepRecord, seen: set[int]) -> Findings:
        """Report layers without a call in this step that had one before."""
        # Capture writes an event about layers that never had one.
        missing = sorted(self._expected - seen)
        self._expected = self._expected | seen
        if not missing or not seen or not self._is_followed or self.context.is_standalone:
            return
        n_layers = len(self._expected)
        sentence = (
            f"No attention call of {format_layers(missing, n_layers)} was captured in step "
            f"{step.step}, unlike in earlier steps and in {format_layers(sorted(seen), n_layers)}: "
            "it is not known what ran there."
        )
        options: dict[str, Any] = {"severity": Severity.WARNING, "series": f"layers {missing}"}
        options |= {"layers": missing, "evidence": {"missing": missing, "seen": len(seen)}}
        yield self.finding(step, "observer.incomplete", sentence, **options)
