"""Rules that have not looked at a trace yet look now, and what they say is stored in it.

While a run records, the cheap rules look at every step. The dear ones, and those that were not
installed then, look here: at the steps as they are in the trace, generation by generation, each
rule once. Of a generation that never came to its end, or a branch of which did not (its process was
killed), the rules that looked live say here what they say at an end.

`python -m flexinspect.review TRACE` does it in a process of its own and prints what could not be
stored, as JSON: so the interface is not held up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexinspect.errors import FlexInspectError, TraceError, TraceWriteError
from flexinspect.findings import Finding, Repeat, Severity
from flexinspect.gradientrecords import GradientRecord
from flexinspect.processes import recorder_lives
from flexinspect.recall import branch_beginning, recalled
from flexinspect.records import EventRecord, GenerationRecord, StepRecord
from flexinspect.rules.base import Rule, RuleBook
from flexinspect.rules.catalogue import catalogue
from flexinspect.rules.scene import Scene
from flexinspect.trace.append import Reviewed, append
from flexinspect.trace.gradients import all_gradients
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.replay import beginning, is_loose, replay, steps
from flexinspect.trace.rows import BranchRow, GenerationRow
from flexinspect.trace.values import from_json, to_json

Progress = Callable[[int, int], None]
"""Told of steps that are done, and of all there are."""


@dataclass(frozen=True, slots=True)
class Review:
    """What rules said afterwards: `unstored` is what the trace does not hold, and `note` why.

    `n_rules` is how many looked, at one generation at least.
    """

    n_rules: int = 0
    unstored: tuple[Reviewed, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A generation, and the rules that are to look at it; of `enders` only the end counts."""

    generation: GenerationRow
    rules: tuple[Rule, ...]
    enders: tuple[Rule, ...] = ()


def tasks(reader: TraceReader, rules: Sequence[Rule]) -> list[Task]:
    """Return what is still to be looked at; while it is recorded, of generations that are over."""
    run = reader.run()
    is_recorded = _is_recorded(run)
    live, done = looked_live(run, rules), set(reader.reviews())
    found = []
    for about in reader.generations():
        ended = _has_ended(reader, about)
        if is_recorded and not ended:
            continue
        left = [rule for rule in rules if (rule.name, about.generation) not in done]
        if is_loose(about):
            left = [rule for rule in left if rule.loose]
        news = tuple(rule for rule in left if rule.name not in live)
        enders = tuple(rule for rule in left if rule.name in live and _speaks_at_end(rule))
        if news or (enders and not ended):
            found.append(Task(about, news, () if ended else enders))
    return found


def looked_live(run: Mapping[str, Any], rules: Iterable[Rule]) -> frozenset[str]:
    """Return the names of the rules that looked at each step as it came.

    A manifest that names none is of a program that had all but the dear ones.
    """
    named = run.get("rules")
    if isinstance(named, list):
        return frozenset(map(str, named))
    return frozenset(rule.name for rule in rules if not rule.dear)


def _is_recorded(run: Mapping[str, Any]) -> bool:
    return run.get("state") == "recording" and recorder_lives(run)


def _has_ended(reader: TraceReader, about: GenerationRow) -> bool:
    """Tell whether a generation and all its branches came to their end."""
    return all(row.state == "finished" for row in reader.branches(about.generation))


def _speaks_at_end(rule: Rule) -> bool:
    return type(rule).end is not Rule.end


def review(
    reader: TraceReader,
    rules: Sequence[Rule] | None = None,
    *,
    progress: Progress | None = None,
    store: bool = True,
) -> Review:
    """Let the rules (those registered, unless given) look at what they have not seen yet.

    What they say is stored, a generation in one transaction; where that cannot be, or is not
    wanted, or the trace is still recorded, `unstored` has it. Of a generation that is damaged
    `note` says so. Raises `TraceError` for a trace that cannot be read at all.
    """
    todo = tasks(reader, catalogue().rules if rules is None else rules)
    meter = _Meter(progress, [reader.n_steps(task.generation.generation) for task in todo])
    unstored: list[Reviewed] = []
    notes: dict[str, None] = {}
    store = store and not _is_recorded(reader.run())
    shared: dict[str, Any] = {}
    for task in todo:
        try:
            found = _look(reader, task, meter.next(), shared)
        except TraceError as error:  # the other generations may be whole
            notes[error.message] = None
            continue
        if store and not unstored:
            why = _stored(reader.path, found)
            if not why:
                continue
            notes[why] = None
        unstored += found
    names = {rule.name for task in todo for rule in (*task.rules, *task.enders)}
    return Review(len(names), tuple(unstored), " ".join(notes))


class _Meter:
    """Counts the steps of all tasks for whoever shows progress."""

    def __init__(self, progress: Progress | None, sizes: Sequence[int]) -> None:
        self._progress, self._sizes = progress, list(sizes)
        self._total, self._before = sum(sizes), 0

    def next(self) -> Callable[[int], None]:
        """Return what is to be told of each step of the next task."""
        before, self._before = self._before, self._before + self._sizes.pop(0)

        def told(n_steps: int) -> None:
            if self._progress is not None:
                self._progress(min(before + n_steps, self._total), self._total)

        return told


def _stored(path: Path, found: Sequence[Reviewed]) -> str:
    """Store what was found; returns why that was not possible, empty if it was."""
    try:
        append(path, found)
    except (TraceWriteError, TraceError) as error:
        return error.message
    return ""


def _look(
    reader: TraceReader, task: Task, told_step: Callable[[int], None], shared: dict[str, Any]
) -> list[Reviewed]:
    """Replay one generation for all rules of a task, and return what each said."""
    about = task.generation
    scene, started_at = Scene(find_mask=reader.mask), time.time()
    scene.shared = shared
    told = {_place(one) for one in reader.findings() if one.generation == about.generation}
    lookers = [
        *(_Looker(rule, scene, loose=is_loose(about)) for rule in task.rules),
        *(_Looker(rule, scene, loose=is_loose(about), told=told) for rule in task.enders),
    ]
    record, streams = beginning(reader, about), {s for one in lookers for s in one.rule.streams}
    for one in lookers:
        one.begin(record)
    n_steps = 0
    for what in replay(reader, about.generation, streams):
        for one in lookers:
            one.take(what)
        if isinstance(what, StepRecord):
            n_steps += 1
            told_step(n_steps)
    for one in lookers:
        one.end()
    for row in reader.branches(about.generation)[1:]:
        _look_at_branch(reader, task, row, lookers, streams)
    return [one.result(about.generation, started_at) for one in lookers]


def _look_at_branch(
    reader: TraceReader,
    task: Task,
    row: BranchRow,
    lookers: Sequence[_Looker],
    streams: Collection[str],
) -> None:
    """Replay one branch for new objects of all rules, and add what each said."""
    about, scene = task.generation, Scene(find_mask=reader.mask)
    record = branch_beginning(reader, about, row)
    anew = [one.anew(scene, row.branch) for one in lookers]
    for one in anew:
        one.begin(record)
        if row.change.get("recomputed") is not True:
            one.recall(reader, row)
    for step in steps(reader, about.generation, row.branch, streams):
        for one in anew:
            one.take(step)
    for gradients in all_gradients(reader, about.generation, row.branch):
        for one in anew:
            one.take(gradients)
    for one, before in zip(anew, lookers, strict=True):
        one.end()
        before.add(one)


def _place(finding: Finding) -> tuple[Any, ...]:
    return finding.id, finding.branch, finding.step, finding.layer, finding.head, finding.sentence


@dataclass
class _Looker:
    """One rule with a book of its own, so that what it says and takes is told apart.

    Of one that has `told` (where and what) only news at the end count.
    """

    rule: Rule
    scene: Scene
    loose: bool
    told: set[tuple[Any, ...]] | None = None
    branch: int = 0
    wall_s: float = 0.0
    found: list[Finding] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._book = RuleBook(
            [self.rule], is_loose=self.loose, scene=self.scene, branch=self.branch
        )

    def anew(self, scene: Scene, branch: int) -> _Looker:
        """Return a looker for a branch, with a rule that has seen nothing."""
        return _Looker(type(self.rule)(), scene, self.loose, self.told, branch)

    def recall(self, reader: TraceReader, row: BranchRow) -> None:
        """Show the rule what the branch's parents did before it."""
        self.events += recalled(reader, row.generation, row.branch, self._book)

    def add(self, other: _Looker) -> None:
        """Take over what another looker said."""
        self.found += other.found
        self.events += other.events
        self.wall_s += other.wall_s

    def begin(self, generation: GenerationRecord) -> None:
        self.events += self._book.begin(generation)

    def take(self, what: StepRecord | EventRecord | GradientRecord) -> None:
        """Let the rule look at a step or at gradients, or hear of an event."""
        started = time.perf_counter()
        if isinstance(what, StepRecord):
            self._look(what)
        elif isinstance(what, GradientRecord):
            self._differentiate(what)
        else:
            self._say(*self._book.hear(what), counts=self.told is None)
        self.wall_s += time.perf_counter() - started

    def _look(self, step: StepRecord) -> None:
        seen = self._book.look(step)
        if seen is step:
            return
        self._say(seen.findings, seen.events[len(step.events) :], counts=self.told is None)
        for repeat in seen.repeats:
            self._count(step, repeat)

    def _differentiate(self, gradients: GradientRecord) -> None:
        found, repeats, events = self._book.differentiate(gradients)
        self._say(found, events, counts=self.told is None)
        for repeat in repeats:
            self._count(gradients, repeat)

    def _count(self, step: StepRecord | GradientRecord, again: Repeat) -> None:
        """Count a finding of an earlier step again, as the trace does."""
        series = (again.id, again.series, step.branch)
        for at, finding in enumerate(self.found):
            if (finding.id, finding.series, finding.branch) == series:
                news: dict[str, Any] = {"times": finding.times + 1, "last_step": step.step}
                if again.sentence:
                    news |= {"sentence": again.sentence, "evidence": again.evidence}
                self.found[at] = replace(finding, **news)

    def end(self) -> None:
        """Let the rule speak of the generation as a whole."""
        started = time.perf_counter()
        self._say(*self._book.end(), counts=True)
        self.wall_s += time.perf_counter() - started

    def _say(
        self, found: Sequence[Finding], events: Sequence[EventRecord], *, counts: bool
    ) -> None:
        self.events += events
        if counts:
            self.found += [f for f in found if self.told is None or _place(f) not in self.told]

    def result(self, generation: int, at: float) -> Reviewed:
        """Return what the rule said of the generation."""
        said = (tuple(self.found), tuple(self.events))
        return Reviewed(self.rule.name, generation, *said, at, self.wall_s * 1e3)


# -- in a process of its own -----------------------------------------------------------------------


def command(path: Path) -> list[str]:
    """Return the command that reviews a trace in a process of its own; see `result_of`."""
    return [sys.executable, "-m", "flexinspect.review", str(path)]


def text_of(done: Review) -> str:
    """Return a review as text, for `result_of`."""
    return to_json({**asdict(done), "unstored": [asdict(one) for one in done.unstored]})


def result_of(text: str) -> Review:
    """Return the review that the command printed. Raises `ValueError` for anything else."""
    said = from_json(text)
    try:
        unstored = tuple(_reviewed(one) for one in said["unstored"])
        return Review(int(said["n_rules"]), unstored, str(said["note"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no review: {error}") from None


def _reviewed(said: dict[str, Any]) -> Reviewed:
    findings = tuple(_finding(one) for one in said.pop("findings"))
    events = tuple(EventRecord(**one) for one in said.pop("events"))
    return Reviewed(findings=findings, events=events, **said)


def _finding(said: dict[str, Any]) -> Finding:
    lists = {name: tuple(said[name]) for name in ("positions", "layers")}
    return Finding(**{**said, **lists, "severity": Severity(said["severity"])})


def main(argv: Sequence[str]) -> int:
    """Review the trace that is named, at low priority, and print the review."""
    import os

    if hasattr(os, "nice"):
        os.nice(5)
    try:
        with open_trace(argv[0]) as reader:
            done = review(reader)
    except FlexInspectError as error:
        done = Review(note=error.message)
    print(text_of(done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
