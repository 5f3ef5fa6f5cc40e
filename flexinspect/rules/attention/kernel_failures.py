"""Reports kernel calls that ended a forward with an exception, or that never returned.

If a layer catches the exception and continues, that is a fallback, which the path rule reports.
This rule reports a failure once the forward has ended, and immediately for standalone calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds

KERNEL_FAILED_EVENT = "kernel-failed"
NOT_RETURNED_EVENT = "kernel-did-not-return"
CRASHED_EVENT = "crashed"
"""Events of a process that crashed: `NOT_RETURNED_EVENT` in a kernel call, the other elsewhere."""

_FORWARD_END_EVENTS = ("forward-failed", "error")

_BUILD_ERRORS = (
    "InductorError",
    "CppCompileError",
    "BackendCompilerFailed",
    "LoweringException",
    "CompilationError",
    "NoTritonConfigsError",
)
_MODE_PATTERN = re.compile(r"flex_attention and mode <?([\w.]*)")
_MAX_ERROR_LENGTH = 160
_RECOMPILE_LIMIT_ERROR = "FailOnRecompileLimitHit"


def failure_finding_id(error: str) -> str:
    """The finding id for an exception ("Type: first line"), "" for one of the graphs rule."""
    name = error.partition(":")[0]
    if name == _RECOMPILE_LIMIT_ERROR:
        return ""
    if name == "NotImplementedError" and _MODE_PATTERN.search(error):
        return "observer.logger-breaks-flex"
    return "kernel.does-not-build" if name in _BUILD_ERRORS else "path.kernel-failed"


class FailuresRule(Rule):
    """Reports which kernel call ended a forward or the process, with the exception's message."""

    name = "failures"
    handles_standalone_calls = True
    findings = finding_kinds(
        "path.kernel-failed",
        "kernel.does-not-build",
        "observer.logger-breaks-flex",
        "observer.crash",
    )

    def __init__(self) -> None:
        self._mode = ""
        """The dispatch mode in which FlexAttention failed in this process."""
        self._pending: list[EventRecord] = []

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the pending failures."""
        super().on_generation_start(context)
        self._pending = []

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Drop the failures of a step that was recorded, because its forward continued."""
        if self._pending:
            self._pending = [event for event in self._pending if event.step != step.step]
        return ()

    def on_event(self, event: EventRecord) -> Iterator[Finding]:
        """Store a failed call, and report it when the forward has ended."""
        if event.kind == KERNEL_FAILED_EVENT:
            yield from self._on_kernel_failed(event)
        elif event.kind in (NOT_RETURNED_EVENT, CRASHED_EVENT):
            yield self._event_finding(event, "observer.crash", event.text)
        elif event.kind in _FORWARD_END_EVENTS:
            yield from self.on_generation_end()

    def on_generation_end(self) -> Iterator[Finding]:
        """Report the newest failure; earlier ones were handled, or are its causes."""
        pending, self._pending = self._pending, []
        if pending:
            finding_id = failure_finding_id(str(pending[-1].data.get("error", "")))
            yield self._failure_finding(pending[-1], finding_id, len(pending))

    def _on_kernel_failed(self, event: EventRecord) -> Iterator[Finding]:
        error = str(event.data.get("error", ""))
        finding_id, id_in_mode = failure_finding_id(error), "observer.logger-breaks-flex"
        if finding_id == id_in_mode:
            found = _MODE_PATTERN.search(error)
            self._mode = (found[1] if found else "") or "a dispatch mode"
            sentence = (
                f"FlexAttention raised NotImplementedError{_format_where(event)} inside a dispatch "
                f"mode ({printable(self._mode)}); uncompiled calls may continue to fail in this "
                "process until torch._dynamo.reset()."
            )
            yield self._event_finding(event, id_in_mode, sentence)
        elif self._mode and error.startswith("Unsupported:"):
            sentence = (
                f"FlexAttention still fails{_format_where(event)} (Unsupported) until "
                "torch._dynamo.reset(), because dynamo cached the failure inside the dispatch mode "
                f"{printable(self._mode)}."
            )
            yield self._event_finding(event, id_in_mode, sentence, Severity.ERROR)
        elif finding_id and event.generation is None:
            yield self._failure_finding(event, finding_id, 1)
        elif finding_id:
            self._pending.append(event)

    def _failure_finding(self, event: EventRecord, finding_id: str, n_failed: int) -> Finding:
        data, severity = event.data, None
        error = printable(str(data.get("error", ""))).partition(". ")[0].rstrip(".")
        if len(error) > _MAX_ERROR_LENGTH:
            error = error[: _MAX_ERROR_LENGTH - 1] + "…"
        kernel = printable(str(data.get("kernel")))
        if finding_id == "kernel.does-not-build":
            what = f"Compiled {kernel} does not build{_format_where(event)}: {error}"
        elif event.generation is None:
            what = f"{kernel} raised in a standalone call: {error}"
        else:
            is_standalone = event.step is None
            subject = "A standalone call" if is_standalone else f"The forward of step {event.step}"
            in_layer = f" in layer {data['layer']}" if data.get("layer") is not None else ""
            what = f"{subject} ended{in_layer}: {kernel} raised {error}"
        if finding_id == "path.kernel-failed":
            if _lengths_differ(data):
                severity = Severity.NOTE
            elif event.generation is None:
                severity = Severity.WARNING
        sentence = f"{what}{_format_lengths(data)}."
        return self._event_finding(event, finding_id, sentence, severity, failed=n_failed)

    def _event_finding(
        self,
        event: EventRecord,
        finding_id: str,
        sentence: str,
        severity: Severity | None = None,
        **evidence: Any,
    ) -> Finding:
        return self.finding(
            event,
            finding_id,
            sentence,
            severity=severity,
            layers=event_layers(event),
            evidence={**event.data, **evidence},
        )


def event_layers(event: EventRecord) -> tuple[int, ...]:
    """The layer of an event, as findings list it; empty if it belongs to none."""
    layer = event.data.get("layer")
    return () if layer is None else (layer,)


def _format_where(event: EventRecord) -> str:
    if event.step is None:
        return " in a standalone call"
    layer = event.data.get("layer")
    return f" in step {event.step}" if layer is None else f" in layer {layer}, step {event.step}"


def _lengths_differ(data: Mapping[str, Any]) -> bool:
    pairs = (("q_len", "mask_q"), ("kv_len", "mask_kv"))
    return any(None not in (data.get(a), data.get(b)) and data[a] != data[b] for a, b in pairs)


def _format_lengths(data: Mapping[str, Any]) -> str:
    """The lengths of a call and its mask: ` (1 row, 33 keys, mask made for 1 x 32)`."""
    if data.get("q_len") is None or data.get("kv_len") is None:
        return ""
    mask = f", mask made for {data['mask_q']} x {data['mask_kv']}" if data.get("mask_kv") else ""
    return f" ({plural(data['q_len'], 'row')}, {plural(data['kv_len'], 'key')}{mask})"
