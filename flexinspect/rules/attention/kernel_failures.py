"""Calls that raised, and the one that never returned: which, where, and whose fault it looks like.

A call that raises and is made up for within its layer is a fallback, which the path rule tells of.
What ends a forward is told here, once that is known; outside of a model, where nothing follows, at
once.
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
"""The events of a process that was taken down: within a kernel call, and elsewhere."""

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
    """Return the finding that an exception ("Type: first line") belongs to, "" for the graphs'."""
    name = error.partition(":")[0]
    if name == _RECOMPILE_LIMIT_ERROR:
        return ""
    if name == "NotImplementedError" and _MODE_PATTERN.search(error):
        return LOGGER_BREAKS_FLEX
    return NOT_BUILT if name in _BUILD_ERRORS else KERNEL_FAILED


class FailuresRule(Rule):
    """Says which kernel call ended a forward, or the process, with the exception's own words."""

    name: ClassVar[str] = "failures"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        KERNEL_FAILED: FindingKind(
            Severity.ERROR,
            "a kernel raised, and the forward ended with it",
            "The step has no result: whatever catches the exception goes on without it, often with "
            "another model or the answer so far.",
            "The path panel shows the last step that ran; the event has the lengths that the call "
            "was made with, and the run panel the traceback if nobody caught it.",
            "Compare the lengths in the sentence: a mask is made for exactly as many rows and keys "
            "as the call has. Otherwise the exception's own words name the argument.",
            _FAILURE_QUERY,
        ),
        NOT_BUILT: FindingKind(
            Severity.ERROR,
            "compiled FlexAttention does not build here",
            "Nothing is wrong with the mask: the compiler cannot make code of this call on this "
            "machine, so the step has no result, or another path takes over in silence.",
            "Run the same call without torch.compile: if that works, it is the build. The event "
            "has the compiler's first line.",
            "Run flex uncompiled on a CPU, or leave out what the generated code cannot do there: "
            "left padding in transformers' own mask, LSE, reductions in a rule.",
            _FAILURE_QUERY,
        ),
        LOGGER_BREAKS_FLEX: FindingKind(
            Severity.WARNING,
            "a dispatch mode around FlexAttention made it fail",
            "The observer breaks what it observes, and dynamo remembers the failed trace: plain "
            "calls go on failing in this process when the mode is gone.",
            "Leave the mode out: the call works. Call torch._dynamo.reset() after the mode, and it "
            "works again.",
            "Do not put a TorchDispatchMode around flex; use module hooks or torch's DebugMode. "
            "Call torch._dynamo.reset() once afterwards.",
            _FAILURE_QUERY,
        ),
        CRASH: FindingKind(
            Severity.ERROR,
            "the process was taken down while a kernel ran, or soon after",
            "No exception says what happened, and a broken heap may also have spoilt results "
            "before it ended the process.",
            "Run the named call alone in a process of its own. The steps before it are in this "
            "trace.",
            "Run flex uncompiled on a CPU. In a score rule index captured tensors at once, "
            "m[b, 0, q, k], not link by link, m[b][0][q][k]; give a mask the batch and heads of "
            "the call, or None.",
            "SELECT key, value FROM run WHERE key IN ('state', 'reason') UNION ALL "
            "SELECT kind, text FROM events WHERE kind IN ('not-returned', 'crashed')",
        ),
    }

    def __init__(self) -> None:
        self._mode = ""
        """The dispatch mode under which flex has failed in this process."""
        self._pending: list[EventRecord] = []

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no failure that waits for its outcome."""
        super().on_generation_start(context)
        self._pending = []

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Drop the failures of a step that was recorded: it went on."""
        if self._pending:
            self._pending = [event for event in self._pending if event.step != step.step]
        return ()

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Take a failed call, or tell of it when the forward ended with it."""
        if event.kind == KERNEL_FAILED_EVENT:
            return self._on_kernel_failed(event)
        if event.kind in (NOT_RETURNED_EVENT, CRASHED_EVENT):
            return [self._crash_finding(event)]
        return self._report_pending() if event.kind in _FORWARD_END_EVENTS else ()

    def on_generation_end(self) -> Sequence[Finding]:
        """Tell of what nobody went on after."""
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
        """Tell of the newest failure; those before it were made up for, or are its causes."""
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
            what = f"{kernel} raised, called outside of a model: {error}"
        else:
            loose = event.step is None
            whose = "A call outside of a model" if loose else f"The forward of step {event.step}"
            what = f"{whose} ended{_format_in_layer(event)}: {kernel} raised {error}"
        severity = self.findings[finding_id].severity
        if finding_id == KERNEL_FAILED and (event.generation is None or _lengths_differ(data)):
            severity = Severity.NOTE if _lengths_differ(data) else Severity.WARNING
        evidence = {**data, "failed": n_failed}
        return self._make_finding(
            event, finding_id, severity, f"{what}{_format_lengths(data)}.", evidence
        )

    def _under_mode_finding(self, event: EventRecord) -> Finding:
        sentence = (
            f"FlexAttention raised NotImplementedError{_format_where(event)} under a dispatch mode around "
            f"it ({printable(self._mode)}); uncompiled calls may go on failing in this process "
            "until torch._dynamo.reset()."
        )
        return self._make_finding(event, LOGGER_BREAKS_FLEX, Severity.WARNING, sentence, event.data)

    def _after_mode_finding(self, event: EventRecord) -> Finding:
        sentence = (
            f"FlexAttention still fails{_format_where(event)} (Unsupported), as dynamo remembers what "
            f"failed under the dispatch mode {printable(self._mode)}: until torch._dynamo.reset()."
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
    """Return an exception's words, cut after the first sentence or where they grow long."""
    words = printable(error).partition(". ")[0].rstrip(".")
    return words if len(words) <= _MAX_ERROR_LENGTH else words[: _MAX_ERROR_LENGTH - 1] + "…"


def _format_in_layer(event: EventRecord) -> str:
    layer = event.data.get("layer")
    return "" if layer is None else f" in layer {layer}"


def _format_where(event: EventRecord) -> str:
    if event.step is None:
        return " outside of a model"
    return f"{_format_in_layer(event)}{',' if _format_in_layer(event) else ' in'} step {event.step}"


def _lengths_differ(data: Mapping[str, Any]) -> bool:
    pairs = (("q_len", "mask_q"), ("kv_len", "mask_kv"))
    return any(None not in (data.get(a), data.get(b)) and data[a] != data[b] for a, b in pairs)


def _format_lengths(data: Mapping[str, Any]) -> str:
    """Return the lengths of a call and its mask: ` (1 row, 33 keys, mask made for 1 x 32)`."""
    if data.get("q_len") is None or data.get("kv_len") is None:
        return ""
    mask = f", mask made for {data['mask_q']} x {data['mask_kv']}" if data.get("mask_kv") else ""
    return f" ({plural(data['q_len'], 'row')}, {plural(data['kv_len'], 'key')}{mask})"
