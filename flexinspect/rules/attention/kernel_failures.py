"""Reports kernel calls that ended a forward with an exception, or that never returned.

If a layer catches the exception and continues, that is a fallback, which the path rule reports.
This rule reports a failure once the forward has ended, and immediately for standalone calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

KERNEL_FAILED = "path.kernel-failed"
NOT_BUILT = "kernel.does-not-build"
LOGGER_BREAKS_FLEX = "observer.logger-breaks-flex"
CRASH = "observer.crash"

KERNEL_FAILED_EVENT = "kernel-failed"
NOT_RETURNED_EVENT = "not-returned"
CRASHED_EVENT = "crashed"
"""Events of a process that crashed: `NOT_RETURNED_EVENT` in a kernel call, the other elsewhere."""

_FORWARD_END_EVENTS = ("forward-failed", "error")

_FAILURE_QUERY = (
    "SELECT kind, text, data FROM events WHERE kind IN ('kernel-failed', 'forward-failed', 'error')"
    " AND (generation IS NULL OR (generation = {generation} AND step IS {step}))"
)

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
        return LOGGER_BREAKS_FLEX
    return NOT_BUILT if name in _BUILD_ERRORS else KERNEL_FAILED


class FailuresRule(Rule):
    """Reports which kernel call ended a forward or the process, with the exception's message."""

    name: ClassVar[str] = "failures"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        KERNEL_FAILED: FindingKind(
            Severity.ERROR,
            "a kernel raised an exception that ended the forward",
            why="The step has no result. Code that catches the exception continues without it, "
            "often with another model or the answer so far.",
            confirm="The path panel shows the last step that ran. The event has the lengths of the "
            "call, and the run panel has the traceback of an uncaught exception.",
            fix="Compare the lengths in the sentence: the mask must have exactly as many rows and "
            "keys as the call. Otherwise the exception's message names the argument.",
            query=_FAILURE_QUERY,
        ),
        NOT_BUILT: FindingKind(
            Severity.ERROR,
            "compiled FlexAttention does not build on this machine",
            why="The mask is not at fault: the compiler cannot generate code for this call on this "
            "machine. The step has no result, or code silently falls back to another path.",
            confirm="Run the same call without torch.compile: if it works, the build is at fault. "
            "The event has the first line of the compiler error.",
            fix="Run FlexAttention uncompiled on a CPU, or avoid what the generated code does not "
            "support there: left padding in transformers' own mask, LSE, reductions in a mask_mod.",
            query=_FAILURE_QUERY,
        ),
        LOGGER_BREAKS_FLEX: FindingKind(
            Severity.WARNING,
            "FlexAttention failed inside a dispatch mode",
            why="The observing mode breaks the call, and dynamo caches the failed trace: plain "
            "calls in this process can fail even after the mode has ended.",
            confirm="Without the mode the call works. After the mode it works again once "
            "torch._dynamo.reset() is called.",
            fix="Do not run FlexAttention inside a TorchDispatchMode; use module hooks or torch's "
            "DebugMode. Call torch._dynamo.reset() once afterwards.",
            query=_FAILURE_QUERY,
        ),
        CRASH: FindingKind(
            Severity.ERROR,
            "the process crashed while a kernel ran, or soon after",
            why="There is no exception, and a corrupted heap may have changed results before the "
            "process ended.",
            confirm="Run the named call alone in a separate process. The steps before it are in "
            "this trace.",
            fix="Run FlexAttention uncompiled on a CPU. In a score_mod index captured tensors at "
            "once, m[b, 0, q, k], not in a chain, m[b][0][q][k]. Create the mask with the batch "
            "and heads of the call, or None.",
            query="SELECT key, value FROM run WHERE key IN ('state', 'reason') UNION ALL "
            "SELECT kind, text FROM events WHERE kind IN ('not-returned', 'crashed')",
        ),
    }

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

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store a failed call, and report it when the forward has ended."""
        if event.kind == KERNEL_FAILED_EVENT:
            return self._on_kernel_failed(event)
        if event.kind in (NOT_RETURNED_EVENT, CRASHED_EVENT):
            return [self._crash_finding(event)]
        return self._report_pending() if event.kind in _FORWARD_END_EVENTS else ()

    def on_generation_end(self) -> Sequence[Finding]:
        """Report failures after which no step followed."""
        return self._report_pending()

    def _on_kernel_failed(self, event: EventRecord) -> Sequence[Finding]:
        error = str(event.data.get("error", ""))
        finding_id = failure_finding_id(error)
        if not finding_id:
            return ()
        if finding_id == LOGGER_BREAKS_FLEX:
            found = _MODE_PATTERN.search(error)
            self._mode = (found[1] if found else "") or "a dispatch mode"
            return [self._under_mode_finding(event)]
        if self._mode and error.startswith("Unsupported:"):
            return [self._after_mode_finding(event)]
        if event.generation is None:
            return [self._finding(event, finding_id, 1)]
        self._pending.append(event)
        return ()

    def _report_pending(self) -> Sequence[Finding]:
        """Report the newest failure; earlier ones were handled, or are its causes."""
        pending, self._pending = self._pending, []
        if not pending:
            return ()
        error = str(pending[-1].data.get("error", ""))
        return [self._finding(pending[-1], failure_finding_id(error), len(pending))]

    def _finding(self, event: EventRecord, finding_id: str, n_failed: int) -> Finding:
        data = event.data
        error, kernel = (
            _shorten_error(str(data.get("error", ""))),
            printable(str(data.get("kernel"))),
        )
        if finding_id == NOT_BUILT:
            what = f"Compiled {kernel} does not build{_format_where(event)}: {error}"
        elif event.generation is None:
            what = f"{kernel} raised in a standalone call: {error}"
        else:
            is_standalone = event.step is None
            subject = "A standalone call" if is_standalone else f"The forward of step {event.step}"
            what = f"{subject} ended{_format_in_layer(event)}: {kernel} raised {error}"
        severity = self.findings[finding_id].severity
        if finding_id == KERNEL_FAILED and (event.generation is None or _lengths_differ(data)):
            severity = Severity.NOTE if _lengths_differ(data) else Severity.WARNING
        evidence = {**data, "failed": n_failed}
        return self._make_finding(
            event, finding_id, severity, f"{what}{_format_lengths(data)}.", evidence
        )

    def _under_mode_finding(self, event: EventRecord) -> Finding:
        sentence = (
            f"FlexAttention raised NotImplementedError{_format_where(event)} inside a dispatch "
            f"mode ({printable(self._mode)}); uncompiled calls may continue to fail in this "
            "process until torch._dynamo.reset()."
        )
        return self._make_finding(event, LOGGER_BREAKS_FLEX, Severity.WARNING, sentence, event.data)

    def _after_mode_finding(self, event: EventRecord) -> Finding:
        sentence = (
            f"FlexAttention still fails{_format_where(event)} (Unsupported) until "
            "torch._dynamo.reset(), because dynamo cached the failure inside the dispatch mode "
            f"{printable(self._mode)}."
        )
        return self._make_finding(event, LOGGER_BREAKS_FLEX, Severity.ERROR, sentence, event.data)

    def _crash_finding(self, event: EventRecord) -> Finding:
        return self._make_finding(event, CRASH, Severity.ERROR, event.text, event.data)

    def _make_finding(
        self,
        event: EventRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        evidence: Mapping[str, Any],
    ) -> Finding:
        generation = event.generation
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=sentence,
            generation=self.context.generation.generation if generation is None else generation,
            step=event.step,
            layer=event.data.get("layer"),
            evidence=evidence,
        )


def _shorten_error(error: str) -> str:
    """The first sentence of an exception's message, cut at `_MAX_ERROR_LENGTH`."""
    words = printable(error).partition(". ")[0].rstrip(".")
    return words if len(words) <= _MAX_ERROR_LENGTH else words[: _MAX_ERROR_LENGTH - 1] + "…"


def _format_in_layer(event: EventRecord) -> str:
    layer = event.data.get("layer")
    return "" if layer is None else f" in layer {layer}"


def _format_where(event: EventRecord) -> str:
    if event.step is None:
        return " in a standalone call"
    return f"{_format_in_layer(event)}{',' if _format_in_layer(event) else ' in'} step {event.step}"


def _lengths_differ(data: Mapping[str, Any]) -> bool:
    pairs = (("q_len", "mask_q"), ("kv_len", "mask_kv"))
    return any(None not in (data.get(a), data.get(b)) and data[a] != data[b] for a, b in pairs)


def _format_lengths(data: Mapping[str, Any]) -> str:
    """The lengths of a call and its mask: ` (1 row, 33 keys, mask made for 1 x 32)`."""
    if data.get("q_len") is None or data.get("kv_len") is None:
        return ""
    mask = f", mask made for {data['mask_q']} x {data['mask_kv']}" if data.get("mask_kv") else ""
    return f" ({plural(data['q_len'], 'row')}, {plural(data['kv_len'], 'key')}{mask})"
