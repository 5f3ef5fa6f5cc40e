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

from flexinspect.breaks import BreakpointBook, Facts, Sighting, Unknown, Verdict, facts_of, judge
from flexinspect.breaks.book import Action, Breakpoint
from flexinspect.breaks.hits import BreakpointHit, hit_of
from flexinspect.breaks.reasons import missing_words
from flexinspect.breaks.tree import has_finding
from flexinspect.findings import Finding
from flexinspect.recall import recorded
from flexinspect.records import EventRecord, StepRecord
from flexinspect_hooks.clock import StepContext

HIT_EVENT = "breakpoint"
"""The event of a hit. One that stops at the gate is told by the gate when it is reached."""

UNJUDGED_EVENT = "breakpoint-unknown"
"""A breakpoint that could not be judged: told once for each."""

MOST_OPEN = 256
"""Steps whose sightings wait for their record; one that never gets a record is forgotten."""


class Stopper(Protocol):
    """What a hit does to the run."""

    def arm(self, on: bool) -> None:
        """From now on there are breakpoints to judge, or none any more. From any thread."""
        ...

    def can_stop_inside(self) -> bool:
        """Say whether it could stop at once in the middle of a forward."""
        ...

    def stop_inside(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop at once; in the model's thread. `frame` is where the hit was noticed."""
        ...

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Stop before the next step, for the hits of one step. From the writer thread."""
        ...

    def pass_on(self, settle: Callable[[], None], frame: FrameType) -> None:
        """A step is about to begin, or the last is over; in the model's thread.

        `settle` waits until all finished steps are judged.
        """
        ...


@dataclass(slots=True)
class StepSights:
    """What is seen of a step while it runs. `met` are the breakpoints that it has met."""

    values: dict[str, float | str]
    layers: dict[int, dict[str, float | str]] = field(default_factory=dict)
    sightings: list[Sighting] = field(default_factory=list)
    looked: set[str] = field(default_factory=set)
    met: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, step: StepContext) -> StepSights:
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

    def facts(self) -> Facts:
        """Return what is known by now."""
        return Facts(self.values, self.layers, tuple(self.sightings))


def event_of(hit: BreakpointHit) -> EventRecord:
    """Return what the trace is told of a hit."""
    place = (hit.generation, hit.step)
    return EventRecord(HIT_EVENT, hit.sentence(), time.time(), *place, hit.as_facts())


class Breaking:
    """The breakpoints of a process: one book, judged for every session.

    `event` records an event; it is called from any thread.
    """

    def __init__(
        self,
        book: BreakpointBook,
        stopper: Stopper,
        event: Callable[[EventRecord], None] = lambda _: None,
    ) -> None:
        self.book, self.stopper, self.event = book, stopper, event
        self._open: OrderedDict[tuple[int, int, int], StepSights] = OrderedDict()
        self._lock, self._arming = threading.Lock(), threading.Lock()
        self._told: set[int] = set()
        book.changed = self._rearm
        self._rearm()

    def _rearm(self) -> None:
        with self._arming:  # else what is older may be armed last
            self.stopper.arm(bool(self.book.enabled()))

    # -- while a step runs -----------------------------------------------------------------------

    def begin(self, step: StepContext) -> StepSights:
        """Begin to look at a step; its record is judged with what is seen."""
        sights = StepSights.of(step)
        with self._lock:
            self._open[(step.generation, step.branch, step.step)] = sights
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return sights

    def move(self, step: StepContext, branch: int) -> None:
        """Keep what was seen of a step for its record, which turned out to be another branch's."""
        with self._lock:
            sights = self._open.pop((step.generation, step.branch, step.step), None)
            if sights is not None:
                sights.values["branch"] = branch
                self._open[(step.generation, branch, step.step)] = sights

    def look(self, sights: StepSights, breakpoints: Sequence[Breakpoint], frame: FrameType) -> None:
        """Judge breakpoints inside the forward, by what is known already."""
        for met in breakpoints:
            if met.id in sights.met:
                continue
            facts = sights.facts()
            verdict = judge(met.expression, facts)
            if verdict.holds is not True:
                continue
            sights.met.add(met.id)
            hit = hit_of(met, facts, verdict, inside=True)
            action = self.book.hit(met.id)
            if action is not Action.PASS:
                self.event(event_of(hit))
            if action is Action.STOP:
                self.stopper.stop_inside(hit, frame)
            if met.options.once:
                self._rearm()

    # -- in the writer thread --------------------------------------------------------------------

    def judge(self, record: StepRecord) -> None:
        """Judge the record of a step, which is written already.

        A step that was over before a breakpoint was set is none of its, though written later.
        """
        if not self.book.version:
            return
        with self._lock:
            sights = self._open.pop((record.generation, record.branch, record.step), None)
        ended = record.started_at + record.wall_ms / 1e3
        breakpoints = tuple(met for met in self.book.enabled() if met.since <= ended)
        if not breakpoints:
            return
        if sights is None:
            facts = facts_of(record)
        else:
            facts = facts_of(record, sightings=sights.sightings, looked=sights.looked)
            breakpoints = tuple(met for met in breakpoints if met.id not in sights.met)
        self._judge_all(breakpoints, facts)

    def judge_again(self, trace: Path, step: StepContext, branch: int) -> None:
        """Judge a step that ran again and came out as `branch` has it in the trace."""
        record = recorded(trace, step.generation, step.step, branch)
        if record is not None:
            self.judge(replace(record, branch=step.branch, started_at=step.started_at))

    def judge_findings(self, findings: Sequence[Finding], generation: int) -> None:
        """Judge findings that belong to no step, such as those of a generation's end."""
        wanted = [met for met in self.book.enabled() if has_finding(met.expression)]
        if wanted and findings:
            values: Mapping[str, float | str] = {"generation": generation}
            self._judge_all(wanted, Facts(values, findings=tuple(findings)), tells=False)

    def _judge_all(
        self, breakpoints: Sequence[Breakpoint], facts: Facts, *, tells: bool = True
    ) -> None:
        stops = []
        for met in breakpoints:
            verdict = judge(met.expression, facts)
            if isinstance(verdict.holds, Unknown):
                if tells:
                    self._tell_unknown(met, verdict.holds, facts)
            elif verdict.holds and (hit := self._met(met, facts, verdict)) is not None:
                stops.append(hit)
        if stops:
            self.stopper.stop(stops)
        if any(met.options.once for met in breakpoints):
            self._rearm()

    def _met(self, met: Breakpoint, facts: Facts, verdict: Verdict) -> BreakpointHit | None:
        """Count a hit; returns it if the run is to stop for it."""
        action = self.book.hit(met.id)
        hit = hit_of(met, facts, verdict, inside=False)
        if action is Action.LOG:
            self.event(event_of(hit))
        return hit if action is Action.STOP else None

    # -- what is said ----------------------------------------------------------------------------

    def _tell_unknown(self, met: Breakpoint, unknown: Unknown, facts: Facts) -> None:
        if met.id in self._told:
            return
        self.note(met.id, missing_words(met.text, unknown, facts))

    def note(self, number: int, sentence: str) -> None:
        """Say once of a breakpoint that it cannot be judged: in the trace, and in the list."""
        if number not in self._told:
            self._told.add(number)
            self.book.annotate(number, sentence)
            data: dict[str, Any] = {"breakpoint": number}
            self.event(EventRecord(UNJUDGED_EVENT, sentence, time.time(), data=data))
