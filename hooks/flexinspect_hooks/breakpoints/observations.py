"""Evaluation of a run's breakpoints, and the actions at a hit.

The writer thread evaluates each breakpoint when a step is written, on the step's record, the
findings of the rules and the observations made while the model ran. Breakpoints are also evaluated
inside the forward if the action can stop there (a debugger, a callback). A breakpoint is hit at
most once per step.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.breakpoints import evaluation
from flexinspect.breakpoints.evaluation import StepObservations, describe_unknown, observe_step
from flexinspect.breakpoints.grammar import has_finding
from flexinspect.breakpoints.store import (
    Breakpoint,
    BreakpointHit,
    BreakpointStore,
    HitAction,
    make_hit,
)
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect_hooks.capture.step_clock import StepContext

HIT_EVENT = "breakpoint"
"""The event of a hit. For a pause the step barrier records it when the pause is reached."""

UNKNOWN_EVENT = "breakpoint-not-evaluated"
"""The event of a breakpoint that could not be evaluated, recorded once per breakpoint."""

MAX_OPEN_STEPS = 256
"""Most steps whose observations wait for their record; older ones are dropped."""


class ObservedStep(Struct):
    """Observations of a running step; `hit_ids` are the breakpoints that it has hit."""

    values: dict[str, float | str]
    layers: dict[int, dict[str, float | str]] = field(default_factory=dict)
    observed: list[evaluation.Observation] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    hit_ids: set[int] = field(default_factory=set)


def hit_event(hit: BreakpointHit) -> EventRecord:
    """Return the event that records a hit."""
    return EventRecord(
        HIT_EVENT, hit.sentence(), time.time(), hit.generation, hit.step, hit.event_data()
    )


class StopAction(Protocol):
    """What happens at a hit; `PauseAction` describes the methods.

    `deliver_hits` may call `drain` to wait until all finished steps are evaluated.
    """

    def arm(self, on: bool) -> None: ...
    def can_stop_in_forward(self) -> bool: ...
    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None: ...
    def stop(self, hits: Sequence[BreakpointHit]) -> None: ...
    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None: ...


class BreakpointEvaluator:
    """Evaluates the breakpoints of a process for every session.

    `record_event` records an event; it is called from any thread.
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
        with self._arm_lock:  # otherwise an older state could be set last
            self.stop_action.arm(bool(self.store.enabled()))

    # -- while a step runs -----------------------------------------------------------------------

    def begin_step(self, step: StepContext) -> ObservedStep:
        """Start collecting the observations of a step, for the evaluation of its record."""
        values: dict[str, float | str] = {
            "step": step.step,
            "phase": step.phase,
            "generation": step.generation,
            "branch": step.branch,
            "q_len": step.q_len,
            "kv_len": step.kv_after,
        }
        observed = ObservedStep(values)
        with self._lock:
            self._open[(step.generation, step.branch, step.step)] = observed
            while len(self._open) > MAX_OPEN_STEPS:
                self._open.popitem(last=False)
        return observed

    def move_step(self, step: StepContext, branch: int) -> None:
        """Move the observations of a step whose record belongs to another branch."""
        with self._lock:
            observed = self._open.pop((step.generation, step.branch, step.step), None)
            if observed is not None:
                observed.values["branch"] = branch
                self._open[(step.generation, branch, step.step)] = observed

    def evaluate_in_forward(
        self, observed: ObservedStep, breakpoints: Sequence[Breakpoint], frame: FrameType
    ) -> None:
        """Evaluate breakpoints inside the forward, on the observations so far."""
        for met in breakpoints:
            if met.info.id in observed.hit_ids:
                continue
            observations = StepObservations(
                observed.values, observed.layers, tuple(observed.observed)
            )
            result = evaluation.evaluate(met.expression, observations)
            if result.holds is not True:
                continue
            observed.hit_ids.add(met.info.id)
            hit = make_hit(met, observations, result, in_forward=True)
            action = self.store.record_hit(met.info.id)
            if action is not HitAction.PASS:
                self.record_event(hit_event(hit))
            if action is HitAction.STOP:
                self.stop_action.stop_in_forward(hit, frame)
            if met.info.once:
                self._update_armed()

    # -- in the writer thread --------------------------------------------------------------------

    def evaluate(self, record: StepRecord) -> None:
        """Evaluate the breakpoints on the record of a step that has been written.

        Breakpoints that were added after the end of the step are skipped.
        """
        if not self.store.version:
            return
        with self._lock:
            observed = self._open.pop((record.generation, record.branch, record.step), None)
        observed = observed or ObservedStep({})
        ended = record.started_at + record.wall_ms / 1e3
        breakpoints = [
            met
            for met in self.store.enabled()
            if met.enabled_at <= ended and met.info.id not in observed.hit_ids
        ]
        if breakpoints:
            seen, checked = observed.observed, observed.checked
            self._evaluate_all(breakpoints, observe_step(record, observed=seen, checked=checked))

    def evaluate_again(self, trace: Path, step: StepContext, branch: int) -> None:
        """Evaluate a repeated step on its record in `branch` of the trace."""
        # A program under capture must not find numpy loaded before it imports it.
        from flexinspect.trace.replay import read_step

        record = read_step(trace, step.generation, step.step, branch)
        if record is not None:
            self.evaluate(replace(record, branch=step.branch, started_at=step.started_at))

    def evaluate_findings(self, findings: Sequence[Finding], generation: int) -> None:
        """Evaluate findings that belong to no step, such as those at the end of a generation."""
        selected = [met for met in self.store.enabled() if has_finding(met.expression)]
        if selected and findings:
            observations = StepObservations({"generation": generation}, findings=tuple(findings))
            self._evaluate_all(selected, observations, report_unknown=False)

    def _evaluate_all(
        self,
        breakpoints: Sequence[Breakpoint],
        observations: StepObservations,
        *,
        report_unknown: bool = True,
    ) -> None:
        stops = []
        for met in breakpoints:
            result = evaluation.evaluate(met.expression, observations)
            if isinstance(result.holds, evaluation.Unknown):
                if report_unknown and met.info.id not in self._reported:
                    self.report_once(
                        met.info.id, describe_unknown(met.info.text, result.holds, observations)
                    )
            elif result.holds:
                action = self.store.record_hit(met.info.id)
                hit = make_hit(met, observations, result, in_forward=False)
                if action is HitAction.LOG:
                    self.record_event(hit_event(hit))
                elif action is HitAction.STOP:
                    stops.append(hit)
        if stops:
            self.stop_action.stop(stops)
        if any(met.info.once for met in breakpoints):
            self._update_armed()

    def report_once(self, number: int, sentence: str) -> None:
        """Report once, in the trace and the list, that a breakpoint cannot be evaluated."""
        if number not in self._reported:
            self._reported.add(number)
            self.store.set_note(number, sentence)
            data = {"breakpoint": number}
            self.record_event(EventRecord(UNKNOWN_EVENT, sentence, time.time(), data=data))
