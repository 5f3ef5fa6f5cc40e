"""Graphs that torch.compile builds anew: at every step, or until it gives up.

The first call of a kind compiles and the second, of another length, compiles once more with lengths
left open; after that nothing should. Outside of a model each call is a generation of its own, so
what was built in the calls before is remembered across them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flexinspect.findings import Finding, Severity
from flexinspect.records import EventRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.failures import FAILED_EVENT, kind_of_failure
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, printable

EVERY_STEP = "graphs.every-step"
LIMIT = "graphs.limit"

BUILT = ("compiled", "recompiled")
LIMIT_EVENT = "recompile-limit"

ENOUGH = 4
"""Steps in a row with a new graph each, the newest two of them because a rule was new code."""

MANY = 6
"""Steps in a row that are enough whatever the reason."""

_QUERY = (
    "SELECT generation, step, kind, text, data FROM events WHERE kind IN ('compiled', 'recompiled',"
    " 'recompile-limit', 'kernel-failed') ORDER BY event"
)


class GraphsRule(Rule):
    """Says when a graph is built at every step, and when the recompile limit is reached."""

    name: ClassVar[str] = "graphs"
    loose: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        EVERY_STEP: FindingKind(
            Severity.WARNING,
            "torch.compile builds a new graph at every step",
            "Each token waits for a compilation, which costs more than the model; after eight of "
            "them torch.compile gives up and runs uncompiled.",
            "The memory and path panels mark the steps with a graph; the events name the guard "
            "that failed. TORCH_LOGS=recompiles prints it as well.",
            "Make the rule once, outside of the loop, and let it read what changes from a captured "
            "0-dim tensor; do not define it by exec or compose it anew at each step.",
            _QUERY,
            grows=True,
        ),
        LIMIT: FindingKind(
            Severity.WARNING,
            "torch.compile reached its recompile limit",
            "From here on the compiled wrapper runs plain Python: slower, and with another mask "
            "where block tables and rule disagree, as uncompiled flex ignores the tables.",
            "The events show which guard failed at each of the graphs before.",
            "Remove the reason for recompiling (a rule that is new code, a length that is marked "
            "static) rather than raise torch._dynamo.config.recompile_limit.",
            _QUERY,
        ),
    }

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._n_steps = self._n_graphs = self._n_by_code = 0
        self._ms = 0.0
        self._first = 0
        self._told_in: int | None = None
        """The generation of the finding on these steps, None before there is one."""

    def begin(self, scene: Scene) -> None:
        """Begin with no step seen; calls outside of a model go on from those before."""
        super().begin(scene)
        if not scene.is_loose:
            self._forget()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Count graphs in a row, and return what that means once there are too many."""
        if not step.events:
            if self._n_steps:
                self._forget()
            return ()
        built = [event for event in step.events if event.kind in BUILT]
        found = [self._limit(event, step) for event in step.events if event.kind == LIMIT_EVENT]
        if not built:
            self._forget()
            return found
        self._count(step, built)
        if self._is_too_often():
            found.append(self._every_step(step, built[-1]))
        return found

    def hear(self, event: EventRecord) -> Sequence[Finding]:
        """Tell of a call that was refused because of the limit."""
        error = str(event.data.get("error", ""))
        if event.kind != FAILED_EVENT or kind_of_failure(error):
            return ()
        layer = event.data.get("layer")
        where = "" if event.step is None else f" in step {event.step}"
        sentence = (
            f"torch.compile reached its recompile limit{where}, and with fullgraph=True "
            f"{printable(str(event.data.get('kernel')))} raises instead of running."
        )
        severity = Severity.WARNING if event.step is None else Severity.ERROR
        return [self._finding(LIMIT, severity, sentence, event.step, event.data, layer)]

    def _count(self, step: StepRecord, built: Sequence[EventRecord]) -> None:
        key = self._key_of(step)
        if key != self._key:
            self._forget()
            self._key, self._first = key, self._place(step)
        self._n_steps += 1
        self._n_graphs += sum(int(event.data.get("graphs", 1)) for event in built)
        self._n_by_code += any("guard" in event.data for event in built)
        self._ms += step.wall_ms

    def _key_of(self, step: StepRecord) -> tuple[Any, ...]:
        """Return what steps in a row have in common; another kind of call is no repetition."""
        if not self.scene.is_loose:
            return (step.branch, step.phase)
        call = step.calls[0] if step.calls else None
        if call is None:
            return ()
        mask = self.scene.mask(call.mask)
        shape = (call.batch, call.q_heads, call.kv_heads, call.q_len, call.head_dim, call.dtype)
        return (*shape, call.path, None if mask is None else (mask.rule, mask.rule_source))

    def _is_too_often(self) -> bool:
        by_code = self._n_steps >= ENOUGH and self._n_by_code >= ENOUGH - 2
        return by_code or self._n_steps >= MANY

    def _place(self, step: StepRecord) -> int:
        return step.generation if self.scene.is_loose else step.step

    def _every_step(self, step: StepRecord, event: EventRecord) -> Finding:
        what = "calls" if self.scene.is_loose else f"{step.phase} steps"
        rows = f"{self._first} to {self._place(step)}"
        graphs = counted(self._n_graphs, "new graph")
        sentence = (
            f"torch.compile built {graphs} in {self._n_steps} {what} in a row "
            f"({'generations' if self.scene.is_loose else 'steps'} {rows}, {self._ms:.0f} ms)"
            f"{_of(event)}: {self._why(step, event)}."
        )
        evidence = {
            "graphs": self._n_graphs,
            "steps": self._n_steps,
            "first": self._first,
            "ms": round(self._ms, 1),
            **event.data,
        }
        if self._told_in is None:
            self._told_in = step.generation
        series = f"every-step from {self._first}"
        about = (EVERY_STEP, None, sentence, step.step, evidence, None, series, step)
        # Outside of a model each call is a generation: all of them are one finding, in the first.
        return replace(self._finding(*about), generation=self._told_in)

    def _why(self, step: StepRecord, event: EventRecord) -> str:
        if not (guard := event.data.get("guard")):
            reason = event.data.get("reason")
            return f"guard: {printable(str(reason))}" if reason else "no guard is known"
        mask = self.scene.mask(step.calls[0].mask) if step.calls else None
        rule = f', and the rule "{printable(mask.rule)}"' if mask is not None and mask.rule else ""
        source = f" ({printable(mask.rule_source)})" if rule and mask and mask.rule_source else ""
        says = f"{rule}{source} is new code each time" if rule else ", which is new each time"
        return f"guard: {printable(str(guard))}{says}"

    def _limit(self, event: EventRecord, step: StepRecord) -> Finding:
        where = "in a call outside of a model" if self.scene.is_loose else f"in step {step.step}"
        guard = event.data.get("guard") or event.data.get("reason")
        last = f" (last guard: {printable(str(guard))})" if guard else ""
        sentence = (
            f"torch.compile reached its recompile limit {where}{_of(event)}{last}: from here on "
            "that function runs uncompiled, where FlexAttention ignores the block tables."
        )
        return self._finding(LIMIT, None, sentence, step.step, event.data, None, "limit", step)

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
            generation=self.scene.generation.generation if record is None else record.generation,
            branch=0 if record is None else record.branch,
            step=step,
            layer=layer,
            evidence=evidence,
            series=series,
        )


RULE: type[Rule] = GraphsRule


def _of(event: EventRecord) -> str:
    """Return ` for flex_attention`, after what dynamo calls the functions."""
    names = [_NAMES.get(name, name) for name in event.data.get("of", ())]
    return f" for {printable(' and '.join(dict.fromkeys(names)))}" if names else ""


_NAMES = {"_flex_attention_hop_wrapper": "flex_attention (uncompiled)"}
