"""Where breakpoints are judged, and what is done at a hit.

Each is judged when its step is written: by the writer thread, on the step's record with the
findings of the rules and with what was seen while the model ran. What can be known earlier is
judged inside the forward as well, but only where somebody can stop there (a debugger, a callback).
A breakpoint is met at most once in a step.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from flexinspect.breakpoints import (
    BreakpointStore,
    EvaluationResult,
    Observation,
    StepObservations,
    Unknown,
    evaluate_with_layer,
    observe_step,
)
from flexinspect.breakpoints.evaluation import describe_unknown
from flexinspect.breakpoints.store import Breakpoint, BreakpointHit, HitAction, make_hit
from flexinspect.breakpoints.syntax_tree import has_finding
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.trace.replay import read_step
from flexinspect_hooks.capture.step_clock import StepContext

HIT_EVENT = "breakpoint"
"""The event of a hit. One that stops at the gate is told by the gate when it is reached."""

UNKNOWN_EVENT = "breakpoint-unknown"
"""A breakpoint that could not be judged: told once for each."""

MAX_OPEN_STEPS = 256
"""Steps whose sightings wait for their record; one that never gets a record is forgotten."""


class StopAction(Protocol):
    """What a hit does to the run."""

    def arm(self, on: bool) -> None:
        """From now on there are breakpoints to judge, or none any more. From any thread."""
        ...

    def can_stop_in_forward(self) -> bool:
        """Say whether it could stop at once in the middle of a forward."""
        ...

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop at once; in the model's thread. `frame` is where the hit was noticed."""
        ...

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Stop before the next step, for the hits of one step. From the writer thread."""
        ...

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """A step is about to begin, or the last is over; in the model's thread.

        `settle` waits until all finished steps are judged.
        """
        ...


@dataclass(slots=True)
class ObservedStep:
    """What is seen of a step while it runs. `met` are the breakpoints that it has met."""

    values: dict[str, float | str]
    layers: dict[int, dict[str, float | str]] = field(default_factory=dict)
    observed: list[Observation] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    hit_ids: set[int] = field(default_factory=set)

    @classmethod
    def for_step(cls, step: StepContext) -> ObservedStep:
        """Begin with what is known when a step opens."""
        values: dict[str, float | str] = {
            "step": step.step,
            "phase": step.phase,
            "generation": step.generation,
            "branch": step.branch,
            "q_len": step.q_len,
            "kv_len": step.kv_after,
        }
        return cls(values)

    def facts(self) -> StepObservations:
        """Return what is known by now."""
        return StepObservations(self.values, self.layers, tuple(self.observed))


def hit_event(hit: BreakpointHit) -> EventRecord:
    """Return what the trace is told of a hit."""
    place = (hit.generation, hit.step)
    return EventRecord(HIT_EVENT, hit.sentence(), time.time(), *place, hit.event_data())


class BreakpointEvaluator:
    """The breakpoints of a process: one book, judged for every session.

    `event` records an event; it is called from any thread.
    """

    def __init__(
        self,
        store: BreakpointStore,
        stop_action: StopAction,
        record_event: Callable[[EventRecord], None] = lambda _: None,
    ) -> None:
        self.store, self.stop_action, self.record_event = store, stop_action, record_event
        self._open: OrderedDict[tuple[int, int, int], ObservedStep] = OrderedDict()
        self._lock, self._arm_lock = threading.Lock(), threading.Lock()
        self._reported: set[int] = set()
        store.on_change = self._update_armed
        self._update_armed()

    def _update_armed(self) -> None:
        with self._arm_lock:  # else what is older may be armed last
            self.stop_action.arm(bool(self.store.enabled()))

    # -- while a step runs -----------------------------------------------------------------------

    def begin_step(self, step: StepContext) -> ObservedStep:
        """Begin to look at a step; its record is judged with what is seen."""
        sights = ObservedStep.for_step(step)
        with self._lock:
            self._open[(step.generation, step.branch, step.step)] = sights
            while len(self._open) > MAX_OPEN_STEPS:
                self._open.popitem(last=False)
        return sights

    def move_step(self, step: StepContext, branch: int) -> None:
        """Keep what was seen of a step for its record, which turned out to be another branch's."""
        with self._lock:
            sights = self._open.pop((step.generation, step.branch, step.step), None)
            if sights is not None:
                sights.values["branch"] = branch
                self._open[(step.generation, branch, step.step)] = sights

    def evaluate_in_forward(
        self, sights: ObservedStep, breakpoints: Sequence[Breakpoint], frame: FrameType
    ) -> None:
        """Judge breakpoints inside the forward, by what is known already."""
        for met in breakpoints:
            if met.id in sights.hit_ids:
                continue
            facts = sights.facts()
            verdict = evaluate_with_layer(met.expression, facts)
            if verdict.holds is not True:
                continue
            sights.hit_ids.add(met.id)
            hit = make_hit(met, facts, verdict, in_forward=True)
            action = self.store.record_hit(met.id)
            if action is not HitAction.PASS:
                self.record_event(hit_event(hit))
            if action is HitAction.STOP:
                self.stop_action.stop_in_forward(hit, frame)
            if met.options.once:
                self._update_armed()

    # -- in the writer thread --------------------------------------------------------------------

    def evaluate(self, record: StepRecord) -> None:
        """Judge the record of a step, which is written already.

        A step that was over before a breakpoint was set is none of its, though written later.
        """
        if not self.store.version:
            return
        with self._lock:
            sights = self._open.pop((record.generation, record.branch, record.step), None)
        ended = record.started_at + record.wall_ms / 1e3
        breakpoints = tuple(met for met in self.store.enabled() if met.enabled_at <= ended)
        if not breakpoints:
            return
        if sights is None:
            facts = observe_step(record)
        else:
            facts = observe_step(record, observed=sights.observed, checked=sights.checked)
            breakpoints = tuple(met for met in breakpoints if met.id not in sights.hit_ids)
        self._evaluate_all(breakpoints, facts)

    def evaluate_again(self, trace: Path, step: StepContext, branch: int) -> None:
        """Judge a step that ran again and came out as `branch` has it in the trace."""
        record = read_step(trace, step.generation, step.step, branch)
        if record is not None:
            self.evaluate(replace(record, branch=step.branch, started_at=step.started_at))

    def evaluate_findings(self, findings: Sequence[Finding], generation: int) -> None:
        """Judge findings that belong to no step, such as those of a generation's end."""
        wanted = [met for met in self.store.enabled() if has_finding(met.expression)]
        if wanted and findings:
            values: Mapping[str, float | str] = {"generation": generation}
            self._evaluate_all(
                wanted, StepObservations(values, findings=tuple(findings)), report_unknown=False
            )

    def _evaluate_all(
        self,
        breakpoints: Sequence[Breakpoint],
        facts: StepObservations,
        *,
        report_unknown: bool = True,
    ) -> None:
        stops = []
        for met in breakpoints:
            verdict = evaluate_with_layer(met.expression, facts)
            if isinstance(verdict.holds, Unknown):
                if report_unknown:
                    self._report_unknown(met, verdict.holds, facts)
            elif verdict.holds and (hit := self._count_hit(met, facts, verdict)) is not None:
                stops.append(hit)
        if stops:
            self.stop_action.stop(stops)
        if any(met.options.once for met in breakpoints):
            self._update_armed()

    def _count_hit(
        self, met: Breakpoint, facts: StepObservations, verdict: EvaluationResult
    ) -> BreakpointHit | None:
        """Count a hit; returns it if the run is to stop for it."""
        action = self.store.record_hit(met.id)
        hit = make_hit(met, facts, verdict, in_forward=False)
        if action is HitAction.LOG:
            self.record_event(hit_event(hit))
        return hit if action is HitAction.STOP else None

    # -- what is said ----------------------------------------------------------------------------

    def _report_unknown(self, met: Breakpoint, unknown: Unknown, facts: StepObservations) -> None:
        if met.id in self._reported:
            return
        self.report_once(met.id, describe_unknown(met.text, unknown, facts))

    def report_once(self, number: int, sentence: str) -> None:
        """Say once of a breakpoint that it cannot be judged: in the trace, and in the list."""
        if number not in self._reported:
            self._reported.add(number)
            self.store.set_note(number, sentence)
            data: dict[str, Any] = {"breakpoint": number}
            self.record_event(EventRecord(UNKNOWN_EVENT, sentence, time.time(), data=data))
