"""Checks the record itself: failed LSE checks, missing layers, false attention weights.

These findings do not mean that the program is wrong. They show where the record, or what a program
uses as attention weights, differs from what ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from flexinspect.core.text import format_layers as in_layers
from flexinspect.core.text import printable
from flexinspect.masks.attention_row import LSE_TOLERANCE, check_tolerance
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, EventRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

LSE_CHECK = "observer.gate"
INCOMPLETE = "observer.incomplete"
NOT_WEIGHTS = "observer.not-weights"

_FAILURE_EVENTS = ("hook-off", "rule-off", "step-unread")
_NOT_FOLLOWED_EVENT = "not-followed"
_UNSEEN_EVENT = "unseen"


class ObserverRule(Rule):
    """Reports where the record differs from what ran, or is incomplete."""

    name: ClassVar[str] = "observer"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        LSE_CHECK: FindingKind(
            Severity.WARNING,
            "the recorded attention is not what ran",
            why="Recomputing the row from the captured q, k and v under the recorded mask does not "
            "give the layer's output: mask, scores or path differ from the record.",
            confirm="The attention panel does not draw this layer and shows the LSE check. The "
            "query returns the check of every layer.",
            fix="Check what the layer's attention function does besides the kernel: a bias or "
            "temperature, sinks, dropout, or a function registered under a known name.",
            query="SELECT step, layer, path, backend, mask, dtype, gate, gate_kind FROM calls "
            "WHERE generation = {generation} AND branch = {branch} AND step = {step} ORDER BY "
            "layer",
        ),
        INCOMPLETE: FindingKind(
            Severity.NOTE,
            "part of this step was not recorded",
            why="Rules cannot check what is not recorded, so there may be faults without a "
            "finding.",
            confirm="The path panel leaves the layers blank; the events give the reason.",
            fix="If a layer computes attention itself, call a kernel that is captured instead. If "
            "a hook failed, its event has the exception.",
            query="SELECT generation, step, kind, text FROM events WHERE kind IN ('hook-off', "
            "'rule-off', 'step-unread', 'not-followed', 'unseen')",
        ),
        NOT_WEIGHTS: FindingKind(
            Severity.WARNING,
            "the returned attention weights are not attention weights",
            why="A heat map of them looks like attention, but they may be the layer's output or "
            "the log-sum-exp of its rows.",
            confirm="Attention weights are (batch, heads, rows, keys) and their rows sum to 1. The "
            "attention panel shows weights that were recomputed and checked.",
            fix="Use the second return value of an attention function as weights only with eager "
            "attention; FlexAttention returns no weights.",
            query="SELECT step, text, data FROM events WHERE kind = 'no-weights' AND generation = "
            "{generation} AND step = {step}",
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the expected layers."""
        super().on_generation_start(context)
        self._expected: set[int] = set()
        self._is_followed = True

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Check the LSE checks, the layers that were captured, and the events of a step."""
        found: list[Finding] = []
        # A step without a fault costs only these two lines.
        failed = [
            call for call in step.calls if call.gate is not None and call.gate > LSE_TOLERANCE
        ]
        seen = {call.layer for call in step.calls}
        if failed:
            found += self._report_failed_checks(step, failed, len(seen))
        if step.events:
            found += self._check_events(step)
        if seen != self._expected:
            found += self._check_layers(step, seen)
        return found

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Report failures outside a recorded step."""
        if event.kind not in _FAILURE_EVENTS:
            return ()
        generation = event.generation
        return [
            Finding(
                id=INCOMPLETE,
                severity=Severity.WARNING,
                sentence=printable(event.text),
                generation=self.context.generation.generation if generation is None else generation,
                step=event.step,
                evidence={"event": event.kind, **event.data},
                series=event.text,
            )
        ]

    def _report_failed_checks(
        self, step: StepRecord, failed: Iterable[CallRecord], n_layers: int
    ) -> list[Finding]:
        """Report LSE checks above the panel's tolerance; NaN is reported by the numbers rule."""
        bad = [
            call for call in failed if call.gate is not None and call.gate > _call_tolerance(call)
        ]
        if not bad:
            return []
        worst = max(bad, key=lambda call: call.gate or 0.0)
        which = sorted({call.layer for call in bad})
        how = "output" if worst.gate_kind == "output" else "row sum"
        where = (
            "In a standalone call"
            if self.context.is_standalone
            else f"In {in_layers(which, n_layers)}, step {step.step},"
        )
        sentence = (
            f"{where} the record is not what ran: recomputed under the recorded mask, the newest "
            f"row's {how} is off by {worst.gate:.2g} (tolerance {_call_tolerance(worst):g}, path "
            f"{worst.path}, {worst.dtype})."
        )
        evidence = {"gate": worst.gate, "bar": _call_tolerance(worst), "kind": worst.gate_kind}
        series = ",".join(map(str, which))
        return [
            self.finding(step, LSE_CHECK, sentence, evidence=evidence, layers=which, series=series)
        ]

    def _check_events(self, step: StepRecord) -> list[Finding]:
        found = []
        no_weights = [event for event in step.events if event.kind == "no-weights"]
        if no_weights:
            found.append(self._not_weights_finding(step, no_weights))
        for event in step.events:
            if event.kind == _NOT_FOLLOWED_EVENT:
                self._is_followed = False
            if event.kind == _UNSEEN_EVENT and self._expected:
                continue  # `_check_layers` names the layers themselves
            if event.kind in (*_FAILURE_EVENTS, _NOT_FOLLOWED_EVENT, _UNSEEN_EVENT):
                severity = Severity.WARNING if event.kind in _FAILURE_EVENTS else Severity.NOTE
                finding = self.finding(
                    step,
                    INCOMPLETE,
                    printable(event.text),
                    severity=severity,
                    evidence={"event": event.kind},
                    series=event.text if event.kind in _FAILURE_EVENTS else event.kind,
                )
                found.append(finding)
        return found

    def _not_weights_finding(self, step: StepRecord, events: Sequence[EventRecord]) -> Finding:
        which = sorted({int(event.data.get("layer", 0)) for event in events})
        more = f" (and so did {len(which) - 1} more layers)" if len(which) > 1 else ""
        sentence = f"In step {step.step}: {printable(events[0].text).rstrip('.')}{more}."
        return self.finding(
            step,
            NOT_WEIGHTS,
            sentence,
            evidence=events[0].data,
            layers=which,
            series="not-weights",
        )

    def _check_layers(self, step: StepRecord, seen: set[int]) -> list[Finding]:
        """Report layers without a call in this step that had one before.

        Capture writes an event about layers that never had one.
        """
        missing = sorted(self._expected - seen)
        self._expected = self._expected | seen
        if not missing or not seen or not self._is_followed or self.context.is_standalone:
            return []
        n_layers = len(self._expected)
        sentence = (
            f"No attention call of {in_layers(missing, n_layers)} was captured in step "
            f"{step.step}, unlike in earlier steps and in {in_layers(sorted(seen), n_layers)}: it "
            "is not known what ran there."
        )
        return [
            self.finding(
                step,
                INCOMPLETE,
                sentence,
                severity=Severity.WARNING,
                layers=missing,
                evidence={"missing": missing, "seen": len(seen)},
                series=f"layers {missing}",
            )
        ]


def _call_tolerance(call: CallRecord) -> float:
    return check_tolerance(call.gate_kind, call.dtype)
