"""Whether what is shown can be trusted: gates that hold, layers that were seen, weights that are.

None of it says that the program is wrong; all of it says where the debugger, or what a program
takes for attention, is not what ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

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
    """Tells where the record is not what ran, or has gaps."""

    name: ClassVar[str] = "observer"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        LSE_CHECK: FindingKind(
            Severity.WARNING,
            "the attention that would be drawn is not what ran",
            "Recomputed from the captured q, k and v under the recorded mask, the row does not "
            "give the layer's own result: mask, scores or path are not what the record says.",
            "The attention panel refuses to draw this layer and names the gate; the query gives "
            "the gate of every layer.",
            "Look at what the layer's attention function does beside the kernel: a bias or "
            "temperature of its own, sinks, dropout, a function registered under a known name.",
            "SELECT step, layer, path, backend, mask, dtype, gate, gate_kind FROM calls WHERE "
            "generation = {generation} AND branch = {branch} AND step = {step} ORDER BY layer",
        ),
        INCOMPLETE: FindingKind(
            Severity.NOTE,
            "something of this step was not recorded",
            "What is not recorded cannot be judged: no finding does not mean no fault there.",
            "The path panel leaves the layers blank; the events give the reason.",
            "If a layer does its attention by own arithmetic, call a kernel that is watched; if a "
            "hook failed, its event has the exception.",
            "SELECT generation, step, kind, text FROM events WHERE kind IN ('hook-off', 'rule-off',"
            " 'step-unread', 'not-followed', 'unseen')",
        ),
        NOT_WEIGHTS: FindingKind(
            Severity.WARNING,
            "what was returned as attention weights is none",
            "A heat map of it looks like attention and is not: it may be the layer's output, or "
            "the log-sum-exp of its rows.",
            "Weights are (sequences, heads, rows, keys) and their rows sum to 1; the attention "
            "panel shows the weights that were recomputed and checked.",
            "Take the second value of an attention function for weights only under eager; "
            "FlexAttention has none to give.",
            "SELECT step, text, data FROM events WHERE kind = 'no-weights' AND generation = "
            "{generation} AND step = {step}",
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no layer expected."""
        super().on_generation_start(context)
        self._expected: set[int] = set()
        self._is_followed = True

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Look at the gates, at the layers that were seen, and at the step's events."""
        found: list[Finding] = []
        # These two lines are what a step costs in which nothing is wrong.
        red = [call for call in step.calls if call.gate is not None and call.gate > LSE_TOLERANCE]
        seen = {call.layer for call in step.calls}
        if red:
            found += self._check_gates(step, red, len(seen))
        if step.events:
            found += self._check_events(step)
        if seen != self._expected:
            found += self._check_layers(step, seen)
        return found

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Tell of what broke outside of a recorded step."""
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

    def _check_gates(
        self, step: StepRecord, red: Iterable[CallRecord], n_layers: int
    ) -> list[Finding]:
        """Tell of gates above the panel's bar; a NaN is a matter of numbers, and not told here."""
        bad = [call for call in red if call.gate is not None and call.gate > _call_tolerance(call)]
        if not bad:
            return []
        worst = max(bad, key=lambda call: call.gate or 0.0)
        which = sorted({call.layer for call in bad})
        how = "output" if worst.gate_kind == "output" else "row sum"
        where = (
            "In a call outside of a model"
            if self.context.is_standalone
            else (f"In {in_layers(which, n_layers)}, step {step.step},")
        )
        sentence = (
            f"{where} what is recorded is not what ran: recomputed under the recorded mask, the "
            f"newest row's {how} is off by {worst.gate:.2g} (bar {_call_tolerance(worst):g}, path "
            f"{worst.path}, {worst.dtype})."
        )
        evidence = {"gate": worst.gate, "bar": _call_tolerance(worst), "kind": worst.gate_kind}
        series = ",".join(map(str, which))
        about: dict[str, Any] = {"evidence": evidence, "layers": which, "series": series}
        return [self.finding(step, LSE_CHECK, sentence, **about)]

    def _check_events(self, step: StepRecord) -> list[Finding]:
        found = []
        no_weights = [event for event in step.events if event.kind == "no-weights"]
        if no_weights:
            found.append(self._not_weights_finding(step, no_weights))
        for event in step.events:
            if event.kind == _NOT_FOLLOWED_EVENT:
                self._is_followed = False
            if event.kind == _UNSEEN_EVENT and self._expected:
                continue  # the layers themselves are named then
            if event.kind in (*_FAILURE_EVENTS, _NOT_FOLLOWED_EVENT, _UNSEEN_EVENT):
                severity = Severity.WARNING if event.kind in _FAILURE_EVENTS else Severity.NOTE
                evidence = {"event": event.kind}
                words = printable(event.text)
                series = event.text if event.kind in _FAILURE_EVENTS else event.kind
                about: dict[str, Any] = {
                    "severity": severity,
                    "evidence": evidence,
                    "series": series,
                }
                found.append(self.finding(step, INCOMPLETE, words, **about))
        return found

    def _not_weights_finding(self, step: StepRecord, events: Sequence[EventRecord]) -> Finding:
        which = sorted({int(event.data.get("layer", 0)) for event in events})
        more = f" (and so did {len(which) - 1} more layers)" if len(which) > 1 else ""
        sentence = f"In step {step.step}: {printable(events[0].text).rstrip('.')}{more}."
        about: dict[str, Any] = {
            "evidence": events[0].data,
            "layers": which,
            "series": "not-weights",
        }
        return self.finding(step, NOT_WEIGHTS, sentence, **about)

    def _check_layers(self, step: StepRecord, seen: set[int]) -> list[Finding]:
        """Tell of layers without a call in this step that had one before.

        Those that never had one are in an event of the capture's own.
        """
        missing = sorted(self._expected - seen)
        self._expected = self._expected | seen
        if not missing or not seen or not self._is_followed or self.context.is_standalone:
            return []
        n_layers = len(self._expected)
        sentence = (
            f"No attention call of {in_layers(missing, n_layers)} was seen in step {step.step}, "
            f"unlike before, while {in_layers(sorted(seen), n_layers)} had theirs: what ran there "
            "is not known."
        )
        evidence = {"missing": missing, "seen": len(seen)}
        series = f"layers {missing}"
        about: dict[str, Any] = {"severity": Severity.WARNING, "layers": missing, "series": series}
        return [self.finding(step, INCOMPLETE, sentence, evidence=evidence, **about)]


def _call_tolerance(call: CallRecord) -> float:
    return check_tolerance(call.gate_kind, call.dtype)
