"""Graphs that torch.compile builds anew: at every step, or until it gives up.

The first call of a kind compiles and the second, of another length, compiles once more with lengths
left open; after that nothing should. Outside of a model each call is a generation of its own, so
what was built in the calls before is remembered across them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.attention.kernel_failures import KERNEL_FAILED_EVENT, failure_finding_id
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

COMPILED_EVERY_STEP = "graphs.every-step"
RECOMPILE_LIMIT = "graphs.limit"

COMPILE_EVENTS = ("compiled", "recompiled")
RECOMPILE_LIMIT_EVENT = "recompile-limit"

MIN_STEPS_BY_CODE = 4
"""Steps in a row with a new graph each, the newest two of them because a rule was new code."""

MIN_STEPS = 6
"""Steps in a row that are enough whatever the reason."""

_COMPILE_QUERY = (
    "SELECT generation, step, kind, text, data FROM events WHERE kind IN ('compiled', 'recompiled',"
    " 'recompile-limit', 'kernel-failed') ORDER BY event"
)


class GraphsRule(Rule):
    """Says when a graph is built at every step, and when the recompile limit is reached."""

    name: ClassVar[str] = "graphs"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        COMPILED_EVERY_STEP: FindingKind(
            Severity.WARNING,
            "torch.compile builds a new graph at every step",
            "Each token waits for a compilation, which costs more than the model; after eight of "
            "them torch.compile gives up and runs uncompiled.",
            "The memory and path panels mark the steps with a graph; the events name the guard "
            "that failed. TORCH_LOGS=recompiles prints it as well.",
            "Make the rule once, outside of the loop, and let it read what changes from a captured "
            "0-dim tensor; do not define it by exec or compose it anew at each step.",
            _COMPILE_QUERY,
            keeps_latest=True,
        ),
        RECOMPILE_LIMIT: FindingKind(
            Severity.WARNING,
            "torch.compile reached its recompile limit",
            "From here on the compiled wrapper runs plain Python: slower, and with another mask "
            "where block tables and rule disagree, as uncompiled flex ignores the tables.",
            "The events show which guard failed at each of the graphs before.",
            "Remove the reason for recompiling (a rule that is new code, a length that is marked "
            "static) rather than raise torch._dynamo.config.recompile_limit.",
            _COMPILE_QUERY,
        ),
    }

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._n_steps = self._n_graphs = self._n_by_code = 0
        self._ms = 0.0
        self._first = 0
        self._reported_generation: int | None = None
        """The generation of the finding on these steps, None before there is one."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no step seen; calls outside of a model go on from those before."""
        super().on_generation_start(context)
        if not context.is_standalone:
            self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Count graphs in a row, and return what that means once there are too many."""
        if not step.events:
            if self._n_steps:
                self._reset()
            return ()
        built = [event for event in step.events if event.kind in COMPILE_EVENTS]
        found = [
            self._limit_finding(event, step)
            for event in step.events
            if event.kind == RECOMPILE_LIMIT_EVENT
        ]
        if not built:
            self._reset()
            return found
        self._count_graphs(step, built)
        if self._is_too_often():
            found.append(self._every_step_finding(step, built[-1]))
        return found

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Tell of a call that was refused because of the limit."""
        error = str(event.data.get("error", ""))
        if event.kind != KERNEL_FAILED_EVENT or failure_finding_id(error):
            return ()
        layer = event.data.get("layer")
        where = "" if event.step is None else f" in step {event.step}"
        sentence = (
            f"torch.compile reached its recompile limit{where}, and with fullgraph=True "
            f"{printable(str(event.data.get('kernel')))} raises instead of running."
        )
        severity = Severity.WARNING if event.step is None else Severity.ERROR
        return [self._finding(RECOMPILE_LIMIT, severity, sentence, event.step, event.data, layer)]

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
        """Return what steps in a row have in common; another kind of call is no repetition."""
        if not self.context.is_standalone:
            return (step.branch, step.phase)
        call = step.calls[0] if step.calls else None
        if call is None:
            return ()
        mask = self.context.mask(call.mask)
        shape = (call.batch, call.q_heads, call.kv_heads, call.q_len, call.head_dim, call.dtype)
        return (*shape, call.path, None if mask is None else (mask.rule, mask.rule_source))

    def _is_too_often(self) -> bool:
        by_code = self._n_steps >= MIN_STEPS_BY_CODE and self._n_by_code >= MIN_STEPS_BY_CODE - 2
        return by_code or self._n_steps >= MIN_STEPS

    def _step_number(self, step: StepRecord) -> int:
        return step.generation if self.context.is_standalone else step.step

    def _every_step_finding(self, step: StepRecord, event: EventRecord) -> Finding:
        what = "calls" if self.context.is_standalone else f"{step.phase} steps"
        rows = f"{self._first} to {self._step_number(step)}"
        graphs = plural(self._n_graphs, "new graph")
        sentence = (
            f"torch.compile built {graphs} in {self._n_steps} {what} in a row "
            f"({'generations' if self.context.is_standalone else 'steps'} {rows}, {self._ms:.0f} ms)"
            f"{_format_functions(event)}: {self._format_guard(step, event)}."
        )
        evidence = {
            "graphs": self._n_graphs,
            "steps": self._n_steps,
            "first": self._first,
            "ms": round(self._ms, 1),
            **event.data,
        }
        if self._reported_generation is None:
            self._reported_generation = step.generation
        series = f"every-step from {self._first}"
        about = (COMPILED_EVERY_STEP, None, sentence, step.step, evidence, None, series, step)
        # Outside of a model each call is a generation: all of them are one finding, in the first.
        return replace(self._finding(*about), generation=self._reported_generation)

    def _format_guard(self, step: StepRecord, event: EventRecord) -> str:
        if not (guard := event.data.get("guard")):
            reason = event.data.get("reason")
            return f"guard: {printable(str(reason))}" if reason else "no guard is known"
        mask = self.context.mask(step.calls[0].mask) if step.calls else None
        rule = f', and the rule "{printable(mask.rule)}"' if mask is not None and mask.rule else ""
        source = f" ({printable(mask.rule_source)})" if rule and mask and mask.rule_source else ""
        says = f"{rule}{source} is new code each time" if rule else ", which is new each time"
        return f"guard: {printable(str(guard))}{says}"

    def _limit_finding(self, event: EventRecord, step: StepRecord) -> Finding:
        where = (
            "in a call outside of a model" if self.context.is_standalone else f"in step {step.step}"
        )
        guard = event.data.get("guard") or event.data.get("reason")
        last = f" (last guard: {printable(str(guard))})" if guard else ""
        sentence = (
            f"torch.compile reached its recompile limit {where}{_format_functions(event)}{last}: from here on "
            "that function runs uncompiled, where FlexAttention ignores the block tables."
        )
        return self._finding(
            RECOMPILE_LIMIT, None, sentence, step.step, event.data, None, "limit", step
        )

    def _finding(
        self,
        finding_id: str,
        severity: Severity | None,
        sentence: str,
        step: int | None,
        evidence: Mapping[str, Any],
        layer: int | None = None,
        series: str = "",
        record: StepRecord | None = None,
    ) -> Finding:
        return Finding(
            id=finding_id,
            severity=severity or self.findings[finding_id].severity,
            sentence=sentence,
            generation=self.context.generation.generation if record is None else record.generation,
            branch=0 if record is None else record.branch,
            step=step,
            layer=layer,
            evidence=evidence,
            series=series,
        )


def _format_functions(event: EventRecord) -> str:
    """Return ` for flex_attention`, after what dynamo calls the functions."""
    names = [_FUNCTION_NAMES.get(name, name) for name in event.data.get("of", ())]
    return f" for {printable(' and '.join(dict.fromkeys(names)))}" if names else ""


_FUNCTION_NAMES = {"_flex_attention_hop_wrapper": "flex_attention (uncompiled)"}
