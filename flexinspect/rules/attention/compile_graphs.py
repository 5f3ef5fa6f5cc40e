"""Checks how often torch.compile builds a new graph: at every step, or up to its recompile limit.

The first call compiles, and the second, with another length, compiles once more with dynamic
lengths; later calls should not compile. Each standalone call is a generation of its own, so the
counts are kept across them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, MaskRecord, StepRecord
from flexinspect.rules.attention.kernel_failures import (
    KERNEL_FAILED_EVENT,
    event_layers,
    failure_finding_id,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds

COMPILE_EVENTS = ("compiled", "recompiled")

RECOMPILE_LIMIT_EVENT = "recompile-limit"
MIN_STEPS_BY_CODE = 4
"""Consecutive steps with a new graph each, at least two of them because of a new mask_mod."""

MIN_STEPS = 6
"""Consecutive steps with a new graph each, for any reason."""

_FUNCTION_NAMES = {"_flex_attention_hop_wrapper": "flex_attention (uncompiled)"}


class GraphsRule(Rule):
    """Reports a new graph at every step, and a reached recompile limit."""

    name = "graphs"
    handles_standalone_calls = True
    findings = finding_kinds("graphs.every-step", "graphs.limit")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._n_steps = self._n_graphs = self._n_by_code = 0
        self._ms = 0.0
        self._first = 0
        self._reported_generation: int | None = None
        """The generation of the finding about these steps, None before it is reported."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the counts, except between standalone calls."""
        super().on_generation_start(context)
        if not context.is_standalone:
            self._reset()

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Count consecutive new graphs, and report them once there are too many."""
        for event in step.events:
            if event.kind == RECOMPILE_LIMIT_EVENT:
                yield self._limit_finding(event, step)
        built = [event for event in step.events if event.kind in COMPILE_EVENTS]
        if not built:
            if self._n_steps:
                self._reset()
            return
        self._count_graphs(step, built)
        by_code = self._n_steps >= MIN_STEPS_BY_CODE and self._n_by_code >= MIN_STEPS_BY_CODE - 2
        if by_code or self._n_steps >= MIN_STEPS:
            yield self._every_step_finding(step, built[-1])

    def on_event(self, event: EventRecord) -> Iterator[Finding]:
        """Report a call that raised because of the limit."""
        error = str(event.data.get("error", ""))
        if event.kind != KERNEL_FAILED_EVENT or failure_finding_id(error):
            return
        where = "" if event.step is None else f" in step {event.step}"
        sentence = (
            f"torch.compile reached its recompile limit{where}; with fullgraph=True "
            f"{printable(str(event.data.get('kernel')))} raises instead of running uncompiled."
        )
        yield self.finding(
            event,
            "graphs.limit",
            sentence,
            severity=Severity.WARNING if event.step is None else Severity.ERROR,
            layers=event_layers(event),
            evidence=event.data,
        )

    def _count_graphs(self, step: StepRecord, built: Sequence[EventRecord]) -> None:
        key = self._call_key(step)
        if key != self._key:
            self._reset()
            self._key, self._first = key, self._step_number(step)
        self._n_steps += 1
        self._n_graphs += sum(int(event.data.get("graphs", 1)) for event in built)
        self._n_by_code += any("guard" in event.data for event in built)
        self._ms += step.wall_ms

    def _call_key(self, step: StepRecord) -> tuple[Any, ...]:
        """What consecutive steps have in common; a call with another key starts a new count."""
        if not self.context.is_standalone:
            return (step.branch, step.phase)
        if not step.calls:
            return ()
        call, mask = step.calls[0], self._first_mask(step)
        shape = (call.batch, call.q_heads, call.kv_heads, call.q_len, call.head_dim, call.dtype)
        return (*shape, call.path, None if mask is None else (mask.mask_mod, mask.mask_mod_source))

    def _step_number(self, step: StepRecord) -> int:
        return step.generation if self.context.is_standalone else step.step

    def _every_step_finding(self, step: StepRecord, event: EventRecord) -> Finding:
        what, rows = f"{step.phase} steps", "steps"
        if self.context.is_standalone:
            what, rows = "calls", "generations"
        sentence = (
            f"torch.compile built {plural(self._n_graphs, 'new graph')} in {self._n_steps} {what} "
            f"in a row ({rows} {self._first} to {self._step_number(step)}, {self._ms:.0f} ms)"
            f"{_format_functions(event)}: {_format_guard(event, self._first_mask(step))}."
        )
        counts = {"graphs": self._n_graphs, "steps": self._n_steps, "first": self._first}
        evidence = {**counts, "ms": round(self._ms, 1), **event.data}
        if self._reported_generation is None:
            self._reported_generation = step.generation
        series = f"every-step from {self._first}"
        finding = self.finding(
            step, "graphs.every-step", sentence, evidence=evidence, series=series
        )
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
    guard, reason = event.data.get("guard"), event.data.get("reason")
    if not guard:
        return f"guard: {printable(str(reason))}" if reason else "the guard is not known"
    if mask is None or not mask.mask_mod:
        return f"guard: {printable(str(guard))}, which is new each time"
    source = f" ({printable(mask.mask_mod_source)})" if mask.mask_mod_source else ""
    mask_mod = f'"{printable(mask.mask_mod)}"{source}'
    return f"guard: {printable(str(guard))}; the mask_mod {mask_mod} is new code each time"


def _format_functions(event: EventRecord) -> str:
    """` for flex_attention`, from dynamo's names of the functions."""
    names = [_FUNCTION_NAMES.get(name, name) for name in event.data.get("of", ())]
    return f" for {printable(' and '.join(dict.fromkeys(names)))}" if names else ""
