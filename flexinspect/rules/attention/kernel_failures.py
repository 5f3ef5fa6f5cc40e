"""Reports what ended a generation or the program, and calls that compile too often.

If a layer catches the exception of a kernel call and continues, that is a fallback, which the path
rule reports. Other failures are reported once the forward has ended; those of standalone calls when
it is known whether they ended the program. Every exception has one finding: that of the kernel call
that raised it, else the one of `flexinspect.rules.run_failures`.
torch.compile compiles the first call, and the second, with another length, once more with dynamic
lengths; later calls should not compile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from msgspec.structs import replace

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, MaskRecord, StepRecord
from flexinspect.rules import run_failures
from flexinspect.rules.engine import Findings, Rule, finding_kinds

KERNEL_FAILED_EVENT = "kernel-failed"
NOT_RETURNED_EVENT = "kernel-did-not-return"
CRASHED_EVENT = "crashed"
"""Events of a process that crashed: `NOT_RETURNED_EVENT` in a kernel call, the other elsewhere."""

CALLS_ENDED_EVENT = "calls-ended"
"""Given to the rules of standalone calls when the program ends; it is not recorded."""

SILENT_HOOK_EVENT = "hook-did-not-fire"
"""The event of a hook that a compiled model does not run: module, hook, file and line."""

_FORWARD_FAILED_EVENT = "forward-failed"

_BUILD_ERRORS = (
    *("InductorError", "CppCompileError", "BackendCompilerFailed", "LoweringException"),
    *("CompilationError", "NoTritonConfigsError"),
)
_MODE_PATTERN = re.compile(r"flex_attention and mode <?([\w.]*)")
_MAX_ERROR_LENGTH = 160


def failure_finding_id(error: str) -> str:
    """The finding id for an exception ("Type: first line"), "" for one of the graphs rule."""
    name = error.partition(":")[0]
    if name == "FailOnRecompileLimitHit":
        return ""
    if name == "NotImplementedError" and _MODE_PATTERN.search(error):
        return "observer.logger-breaks-flex"
    return "kernel.does-not-build" if name in _BUILD_ERRORS else "path.kernel-failed"


class FailuresRule(Rule):
    """Reports what ended a forward, a generation or the process, with the exception's message."""

    name = "failures"
    needs = (imported.EVENTS,)
    handles_standalone_calls = True
    handles_packed_requests = True
    findings = finding_kinds(
        *("path.kernel-failed", "kernel.*", "observer.crash", "observer.killed"),
        *("observer.logger-*", run_failures.RAISED, run_failures.RULE_RAISED),
    )

    def __init__(self) -> None:
        self._mode = ""  # the dispatch mode in which FlexAttention failed in this process
        self._pending: list[EventRecord] = []
        self._standalone: list[EventRecord] = []  # failures that the program may have caught
        self._reported: set[str] = set()  # exceptions that another finding is about

    def reset(self) -> None:
        self._pending = []
        self._reported.clear()

    def on_step(self, step: StepRecord) -> Findings:
        """Drop the failures of a step that was recorded, because its forward continued."""
        self._pending = [event for event in self._pending if event.step != step.step]
        yield from self._report_caught()

    def on_event(self, event: EventRecord) -> Findings:
        """Store a failed call, and report it when the forward has ended."""
        if event.kind == KERNEL_FAILED_EVENT:
            yield from self._on_kernel_failed(event)
        elif event.kind in (NOT_RETURNED_EVENT, CRASHED_EVENT):
            is_killed = event.data.get("signal") == "SIGKILL"
            finding_id = "observer.killed" if is_killed else "observer.crash"
            yield self._event_finding(event, finding_id, event.text)
        elif event.kind == run_failures.ERROR_EVENT:
            yield from self._on_error(event)
        elif event.kind == _FORWARD_FAILED_EVENT:
            yield from self._report_pending()
        elif event.kind == CALLS_ENDED_EVENT:
            yield from self._report_caught()

    def on_generation_end(self) -> Findings:
        """Report the newest failure; earlier ones were handled, or are its causes."""
        yield from self._report_pending()
        if not self.context.is_standalone:
            yield from self._report_caught()

    def _report_pending(self) -> Findings:
        pending, self._pending = self._pending, []
        if pending:
            yield self._failure_finding(pending[-1], len(pending))

    def _report_caught(self) -> Findings:
        """Report failures of standalone calls after which the program went on."""
        caught, self._standalone = self._standalone, []
        for event in caught:
            yield self._failure_finding(event, 1)

    def _on_error(self, event: EventRecord) -> Findings:
        """Report an exception that ended a generation or the program: once, at its kernel call."""
        chain, failed = event.data.get("chain"), [*self._pending, *self._standalone]
        if chain is None:  # of an earlier version
            chain = [str(one.data.get("error")) for one in failed[-1:]] or [event.text]
        match = next((one for one in reversed(failed) if one.data.get("error") in chain), None)
        if match is not None:
            n_failed = max(len(self._pending), 1)
            self._pending = []
            self._standalone = [one for one in self._standalone if one is not match]
            yield self._failure_finding(match, n_failed, ended_by=event)
        yield from self._report_pending()
        yield from self._report_caught()
        if match is None and self._reported.isdisjoint(chain):
            finding = run_failures.exception_finding(event, self.context.generation.generation)
            if finding is not None:
                yield finding

    def _on_kernel_failed(self, event: EventRecord) -> Findings:
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
            yield self._event_finding(event, id_in_mode, sentence, severity=Severity.ERROR)
        elif finding_id and (event.generation is None or self.context.is_standalone):
            self._standalone.append(event)
        elif finding_id:
            self._pending.append(event)
        if finding_id in ("", id_in_mode):
            self._reported.add(error)

    def _failure_finding(
        self, event: EventRecord, n_failed: int, ended_by: EventRecord | None = None
    ) -> Finding:
        """Return the finding of a kernel call; `ended_by` is the event of the end it led to."""
        data, severity = event.data, None
        finding_id = failure_finding_id(str(data.get("error", "")))
        rule = data.get("rule")
        if rule is not None and finding_id == "path.kernel-failed":
            finding_id = run_failures.RULE_RAISED
        if finding_id != "kernel.does-not-build" and ended_by is None and _is_standalone(event):
            severity = Severity.WARNING
        lengths = (("q_len", "mask_q"), ("kv_len", "mask_kv"))
        pairs = [(data.get(length), data.get(mask_length)) for length, mask_length in lengths]
        has_finding = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        if finding_id == "path.kernel-failed" and has_finding:
            severity = Severity.NOTE
        place = {} if ended_by is None else ended_by.data
        what = _describe_failure(event, place if rule is None else {})
        if rule is not None:
            what = run_failures.rule_sentence(what.rstrip("."), event, place)
        evidence = {**place, "failed": n_failed}
        evidence.pop("traceback", None)
        return self._event_finding(event, finding_id, what, severity=severity, evidence=evidence)

    def _event_finding(self, event: EventRecord, id_: str, text: str, **options: Any) -> Finding:
        evidence = {**event.data, **options.pop("evidence", {})}
        layers = event_layers(event)
        return self.finding(event, id_, text, layers=layers, evidence=evidence, **options)


def _is_standalone(event: EventRecord) -> bool:
    return event.step is None


def _describe_failure(event: EventRecord, place: Mapping[str, Any]) -> str:
    """Return what ended, where, with which lengths, and at the end what the kernel raised."""
    data = event.data
    kernel = printable(str(data.get("kernel")))
    error = printable(str(data.get("error", ""))).partition(". ")[0].rstrip(".")
    if len(error) > _MAX_ERROR_LENGTH:
        error = error[: _MAX_ERROR_LENGTH - 1] + "…"
    lengths = _format_lengths(data)
    user_frame = run_failures.format_frame(place)
    at = f", called from {user_frame}" if user_frame else ""
    if failure_finding_id(str(data.get("error", ""))) == "kernel.does-not-build":
        return f"Compiled {kernel} does not build{_format_where(event)}{lengths}{at}: {error}."
    if event.generation is None:
        return f"{kernel}{lengths} raised in a standalone call{at}: {error}."
    is_outside = event.step is None
    subject = "A standalone call" if is_outside else f"The forward of step {event.step}"
    in_layer = f" in layer {data['layer']}" if data.get("layer") is not None else ""
    what = f"{subject} ended{in_layer}{at}"
    masks = run_failures.mask_sentences(place)
    if masks and "only FlexAttention" in masks[0]:
        return f"{what}. {masks[0]}. {kernel}{lengths} raised {error}."
    return f"{what}: {kernel}{lengths} raised {error}."


def _format_lengths(data: Mapping[str, Any]) -> str:
    if data.get("q_len") is None or data.get("kv_len") is None:
        return ""
    sizes = f"{data['mask_q']} x {data['mask_kv']}" if data.get("mask_kv") else ""
    mask = f", mask made for {sizes}" if sizes else ""
    return f" ({plural(data['q_len'], 'row')}, {plural(data['kv_len'], 'key')}{mask})"


def event_layers(event: EventRecord) -> tuple[int, ...]:
    """The layer of an event, as findings list it; empty if it belongs to none."""
    layer = event.data.get("layer")
    return () if layer is None else (layer,)


def _format_where(event: EventRecord) -> str:
    if event.step is None:
        return " in a standalone call"
    layer = event.data.get("layer")
    return f" in step {event.step}" if layer is None else f" in layer {layer}, step {event.step}"


# Consecutive steps with a new graph each, from which they are reported: for any reason, and if at
# least two of the graphs are due to a new mask_mod.
MIN_STEPS, MIN_STEPS_BY_CODE = 6, 4
_FUNCTION_NAMES = {"_flex_attention_hop_wrapper": "flex_attention (uncompiled)"}


class GraphsRule(Rule):
    """Reports a new graph at every step, and a reached recompile limit."""

    name = "graphs"
    needs = (imported.EVENTS,)
    handles_standalone_calls = True
    findings = finding_kinds("graphs.every-step", "graphs.limit", "graphs.silent-hook")

    def __init__(self) -> None:
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._n_steps = self._n_graphs = self._n_by_code = 0
        self._ms = 0.0
        self._first = 0
        self._reported_generation: int | None = None  # that has the finding

    def reset(self) -> None:
        """Reset the counts, except between standalone calls."""
        if not self.context.is_standalone:
            self._clear_counts()

    def on_step(self, step: StepRecord) -> Findings:
        """Count consecutive new graphs, and report them once there are too many."""
        for event in step.events:
            if event.kind == "recompile-limit":
                yield self._limit_finding(event, step)
        built = [event for event in step.events if event.kind in ("compiled", "recompiled")]
        if not built:
            if self._n_steps:
                self._clear_counts()
            return
        number = step.generation if self.context.is_standalone else step.step
        key = self._call_key(step)
        if key != self._key:
            self._clear_counts()
            self._key, self._first = key, number
        self._n_steps += 1
        self._n_graphs += sum(int(event.data.get("graphs", 1)) for event in built)
        self._n_by_code += any("guard" in event.data for event in built)
        self._ms += step.wall_ms
        by_code = self._n_steps >= MIN_STEPS_BY_CODE and self._n_by_code >= MIN_STEPS_BY_CODE - 2
        if by_code or self._n_steps >= MIN_STEPS:
            yield self._every_step_finding(step, number, built[-1])

    def on_event(self, event: EventRecord) -> Findings:
        """Report a call that raised because of the limit, and hooks that do not fire."""
        if event.kind == SILENT_HOOK_EVENT:
            yield self._silent_hook_finding(event)
        error = str(event.data.get("error", ""))
        if event.kind != KERNEL_FAILED_EVENT or failure_finding_id(error):
            return
        where, severity = f" in step {event.step}", Severity.ERROR
        if event.step is None:
            where, severity = "", Severity.WARNING
        sentence = (
            f"torch.compile reached its recompile limit{where}; with fullgraph=True "
            f"{printable(str(event.data.get('kernel')))} raises instead of running uncompiled."
        )
        options: dict[str, Any] = {"layers": event_layers(event), "evidence": event.data}
        yield self.finding(event, "graphs.limit", sentence, severity=severity, **options)

    def _silent_hook_finding(self, event: EventRecord) -> Finding:
        data = event.data
        where = f"{PurePath(data['file']).name}:{data['line']}" if data.get("file") else ""
        at = f" ({printable(where)})" if where else ""
        sentence = (
            f"The hook {printable(data['hook'])}{at} on {printable(data['module'])} does not run: "
            "it was registered after the model was compiled, and torch.compile does not guard on "
            "hooks, so the compiled graph goes on without it."
        )
        series = f"{data['module']} {data['hook']}"
        return self.finding(event, "graphs.silent-hook", sentence, evidence=data, series=series)

    def _call_key(self, step: StepRecord) -> tuple[Any, ...]:
        """What consecutive steps have in common; a call with another key starts a new count."""
        if not self.context.is_standalone:
            return (step.branch, step.phase)
        if not step.calls:
            return ()
        call, mask = step.calls[0], self._first_mask(step)
        shape = (call.batch, call.q_heads, call.kv_heads, call.q_len, call.head_dim, call.dtype)
        return (*shape, call.path, None if mask is None else (mask.mask_mod, mask.mask_mod_source))

    def _every_step_finding(self, step: StepRecord, number: int, event: EventRecord) -> Finding:
        what, rows = f"{step.phase} steps", "steps"
        if self.context.is_standalone:
            what, rows = "calls", "generations"
        sentence = (
            f"torch.compile built {plural(self._n_graphs, 'new graph')} in {self._n_steps} {what} "
            f"in a row ({rows} {self._first} to {number}, {self._ms:.0f} ms)"
            f"{_format_functions(event)}: {_format_guard(event, self._first_mask(step))}."
        )
        counts = {"graphs": self._n_graphs, "steps": self._n_steps, "first": self._first}
        evidence = {**counts, "ms": round(self._ms, 1), **event.data}
        if self._reported_generation is None:
            self._reported_generation = step.generation
        id_, series = "graphs.every-step", f"every-step from {self._first}"
        finding = self.finding(step, id_, sentence, evidence=evidence, series=series)
        # Each standalone call is a generation; all of them share one finding in the first.
        return replace(finding, generation=self._reported_generation)

    def _first_mask(self, step: StepRecord) -> MaskRecord | None:
        return self.context.mask(step.calls[0].mask) if step.calls else None

    def _limit_finding(self, event: EventRecord, step: StepRecord) -> Finding:
        where = "in a standalone call" if self.context.is_standalone else f"in step {step.step}"
        guard = event.data.get("guard") or event.data.get("reason")
        last = f" (last guard: {printable(str(guard))})" if guard else ""
        sentence = (
            f"torch.compile reached its recompile limit {where}{_format_functions(event)}{last}: "
            "from here on the function runs uncompiled, and FlexAttention ignores the block tables."
        )
        return self.finding(step, "graphs.limit", sentence, evidence=event.data, series="limit")


def _format_guard(event: EventRecord, mask: MaskRecord | None) -> str:
    guard = event.data.get("guard") or event.data.get("reason")
    text = f"guard: {printable(str(guard))}" if guard else "the guard is not known"
    if not event.data.get("guard"):
        return text
    if mask is None or not mask.mask_mod:
        return f"{text}, which is new each time"
    source = f" ({printable(mask.mask_mod_source)})" if mask.mask_mod_source else ""
    return f'{text}; the mask_mod "{printable(mask.mask_mod)}"{source} is new code each time'


def _format_functions(event: EventRecord) -> str:
    """` for flex_attention`, from dynamo's names of the functions."""
    names = [_FUNCTION_NAMES.get(name, name) for name in event.data.get("of", ())]
    return f" for {printable(' and '.join(dict.fromkeys(names)))}" if names else ""
