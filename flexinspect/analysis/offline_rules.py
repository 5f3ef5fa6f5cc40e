"""Rules that have not looked at a trace yet look now, and what they say is stored in it.

While a run records, the cheap rules look at every step. The dear ones, and those that were not
installed then, look here: at the steps as they are in the trace, generation by generation, each
rule once. Of a generation that never came to its end, or a branch of which did not (its process was
killed), the rules that looked live say here what they say at an end.

`python -m flexinspect.analysis.offline_rules TRACE` does it in a process of its own and prints what could not be
stored, as JSON: so the interface is not held up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import FlexInspectError, TraceError, TraceWriteError
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.step import EventRecord, GenerationRecord, StepRecord
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, RuleRunner, load_rules
from flexinspect.trace.codec import from_json, to_json
from flexinspect.trace.file.writer import RuleReview, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace, read_all_gradients
from flexinspect.trace.replay import (
    branch_start_record,
    generation_at_start,
    is_standalone,
    replay,
    replay_parents,
    replay_steps,
)
from flexinspect.trace.rows import BranchRow, GenerationRow

ProgressCallback = Callable[[int, int], None]
"""Told of steps that are done, and of all there are."""


@dataclass(frozen=True, slots=True)
class Review:
    """What rules said afterwards: `unstored` is what the trace does not hold, and `note` why.

    `n_rules` is how many looked, at one generation at least.
    """

    n_rules: int = 0
    unstored: tuple[RuleReview, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReviewTask:
    """A generation, and the rules that are to look at it; of `enders` only the end counts."""

    generation: GenerationRow
    rules: tuple[Rule, ...]
    end_only_rules: tuple[Rule, ...] = ()


def pending_tasks(reader: TraceReader, rules: Sequence[Rule]) -> list[ReviewTask]:
    """Return what is still to be looked at; while it is recorded, of generations that are over."""
    run = reader.run()
    is_recorded = _is_recorded(run)
    live, done = live_rule_names(run, rules), set(reader.reviews())
    found = []
    for about in reader.generations():
        ended = _is_finished(reader, about)
        if is_recorded and not ended:
            continue
        left = [rule for rule in rules if (rule.name, about.generation) not in done]
        if is_standalone(about):
            left = [rule for rule in left if rule.handles_standalone_calls]
        news = tuple(rule for rule in left if rule.name not in live)
        enders = tuple(
            rule for rule in left if rule.name in live and _overrides_generation_end(rule)
        )
        if news or (enders and not ended):
            found.append(ReviewTask(about, news, () if ended else enders))
    return found


def live_rule_names(run: Mapping[str, Any], rules: Iterable[Rule]) -> frozenset[str]:
    """Return the names of the rules that looked at each step as it came.

    A manifest that names none is of a program that had all but the dear ones.
    """
    named = run.get("rules")
    if isinstance(named, list):
        return frozenset(map(str, named))
    return frozenset(rule.name for rule in rules if not rule.offline_only)


def _is_recorded(run: Mapping[str, Any]) -> bool:
    return run.get("state") == "recording" and is_recorder_alive(run)


def _is_finished(reader: TraceReader, generation: GenerationRow) -> bool:
    """Tell whether a generation and all its branches came to their end."""
    return all(row.state == "finished" for row in reader.branches(generation.generation))


def _overrides_generation_end(rule: Rule) -> bool:
    return type(rule).on_generation_end is not Rule.on_generation_end


def review(
    reader: TraceReader,
    rules: Sequence[Rule] | None = None,
    *,
    progress: ProgressCallback | None = None,
    store: bool = True,
) -> Review:
    """Let the rules (those registered, unless given) look at what they have not seen yet.

    What they say is stored, a generation in one transaction; where that cannot be, or is not
    wanted, or the trace is still recorded, `unstored` has it. Of a generation that is damaged
    `note` says so. Raises `TraceError` for a trace that cannot be read at all.
    """
    todo = pending_tasks(reader, load_rules().rules if rules is None else rules)
    meter = _StepCounter(progress, [reader.n_steps(task.generation.generation) for task in todo])
    unstored: list[RuleReview] = []
    notes: dict[str, None] = {}
    store = store and not _is_recorded(reader.run())
    shared: dict[str, Any] = {}
    for task in todo:
        try:
            found = _replay_generation(reader, task, meter.next_task(), shared)
        except TraceError as error:  # the other generations may be whole
            notes[error.message] = None
            continue
        if store and not unstored:
            why = _store(reader.path, found)
            if not why:
                continue
            notes[why] = None
        unstored += found
    names = {rule.name for task in todo for rule in (*task.rules, *task.end_only_rules)}
    return Review(len(names), tuple(unstored), " ".join(notes))


class _StepCounter:
    """Counts the steps of all tasks for whoever shows progress."""

    def __init__(self, progress: ProgressCallback | None, sizes: Sequence[int]) -> None:
        self._progress, self._sizes = progress, list(sizes)
        self._total, self._n_before = sum(sizes), 0

    def next_task(self) -> Callable[[int], None]:
        """Return what is to be told of each step of the next task."""
        before, self._n_before = self._n_before, self._n_before + self._sizes.pop(0)

        def told(n_steps: int) -> None:
            if self._progress is not None:
                self._progress(min(before + n_steps, self._total), self._total)

        return told


def _store(path: Path, found: Sequence[RuleReview]) -> str:
    """Store what was found; returns why that was not possible, empty if it was."""
    try:
        append_reviews(path, found)
    except (TraceWriteError, TraceError) as error:
        return error.message
    return ""


def _replay_generation(
    reader: TraceReader,
    task: ReviewTask,
    on_step_done: Callable[[int], None],
    shared_memory: dict[str, Any],
) -> list[RuleReview]:
    """Replay one generation for all rules of a task, and return what each said."""
    about = task.generation
    scene, started_at = RuleContext(find_mask=reader.mask), time.time()
    scene.shared_memory = shared_memory
    told = {_finding_key(one) for one in reader.findings() if one.generation == about.generation}
    lookers = [
        *(_RuleReplay(rule, scene, is_standalone=is_standalone(about)) for rule in task.rules),
        *(
            _RuleReplay(rule, scene, is_standalone=is_standalone(about), known_findings=told)
            for rule in task.end_only_rules
        ),
    ]
    record, streams = (
        generation_at_start(reader, about),
        {s for one in lookers for s in one.rule.streams},
    )
    for one in lookers:
        one.on_generation_start(record)
    n_steps = 0
    for what in replay(reader, about.generation, streams):
        for one in lookers:
            one.on_record(what)
        if isinstance(what, StepRecord):
            n_steps += 1
            on_step_done(n_steps)
    for one in lookers:
        one.on_generation_end()
    for row in reader.branches(about.generation)[1:]:
        _replay_branch(reader, task, row, lookers, streams)
    return [one.to_reviewed(about.generation, started_at) for one in lookers]


def _replay_branch(
    reader: TraceReader,
    task: ReviewTask,
    row: BranchRow,
    replays: Sequence[_RuleReplay],
    streams: Collection[str],
) -> None:
    """Replay one branch for new objects of all rules, and add what each said."""
    about, scene = task.generation, RuleContext(find_mask=reader.mask)
    record = branch_start_record(reader, about, row)
    anew = [one.for_branch(scene, row.branch) for one in replays]
    for one in anew:
        one.on_generation_start(record)
        if row.change.get("recomputed") is not True:
            one.replay_parents(reader, row)
    for step in replay_steps(reader, about.generation, row.branch, streams):
        for one in anew:
            one.on_record(step)
    for gradients in read_all_gradients(reader, about.generation, row.branch):
        for one in anew:
            one.on_record(gradients)
    for one, before in zip(anew, replays, strict=True):
        one.on_generation_end()
        before.merge(one)


def _finding_key(finding: Finding) -> tuple[Any, ...]:
    return finding.id, finding.branch, finding.step, finding.layer, finding.head, finding.sentence


@dataclass
class _RuleReplay:
    """One rule with a book of its own, so that what it says and takes is told apart.

    Of one that has `told` (where and what) only news at the end count.
    """

    rule: Rule
    context: RuleContext
    is_standalone: bool
    known_findings: set[tuple[Any, ...]] | None = None
    branch: int = 0
    wall_s: float = 0.0
    found: list[Finding] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._runner = RuleRunner(
            [self.rule], is_standalone=self.is_standalone, context=self.context, branch=self.branch
        )

    def for_branch(self, context: RuleContext, branch: int) -> _RuleReplay:
        """Return a looker for a branch, with a rule that has seen nothing."""
        return _RuleReplay(
            type(self.rule)(), context, self.is_standalone, self.known_findings, branch
        )

    def replay_parents(self, reader: TraceReader, row: BranchRow) -> None:
        """Show the rule what the branch's parents did before it."""
        self.events += replay_parents(reader, row.generation, row.branch, self._runner)

    def merge(self, other: _RuleReplay) -> None:
        """Take over what another looker said."""
        self.found += other.found
        self.events += other.events
        self.wall_s += other.wall_s

    def on_generation_start(self, generation: GenerationRecord) -> None:
        self.events += self._runner.on_generation_start(generation)

    def on_record(self, record: StepRecord | EventRecord | GradientRecord) -> None:
        """Let the rule look at a step or at gradients, or hear of an event."""
        started = time.perf_counter()
        if isinstance(record, StepRecord):
            self._on_step(record)
        elif isinstance(record, GradientRecord):
            self._on_gradients(record)
        else:
            self._collect(*self._runner.on_event(record), is_new=self.known_findings is None)
        self.wall_s += time.perf_counter() - started

    def _on_step(self, step: StepRecord) -> None:
        seen = self._runner.on_step(step)
        if seen is step:
            return
        self._collect(
            seen.findings, seen.events[len(step.events) :], is_new=self.known_findings is None
        )
        for repeat in seen.repeats:
            self._count_repeat(step, repeat)

    def _on_gradients(self, gradients: GradientRecord) -> None:
        found, repeats, events = self._runner.on_gradients(gradients)
        self._collect(found, events, is_new=self.known_findings is None)
        for repeat in repeats:
            self._count_repeat(gradients, repeat)

    def _count_repeat(self, step: StepRecord | GradientRecord, repeat: Repeat) -> None:
        """Count a finding of an earlier step again, as the trace does."""
        series = (repeat.id, repeat.series, step.branch)
        for at, finding in enumerate(self.found):
            if (finding.id, finding.series, finding.branch) == series:
                news: dict[str, Any] = {"times": finding.times + 1, "last_step": step.step}
                if repeat.sentence:
                    news |= {"sentence": repeat.sentence, "evidence": repeat.evidence}
                self.found[at] = replace(finding, **news)

    def on_generation_end(self) -> None:
        """Let the rule speak of the generation as a whole."""
        started = time.perf_counter()
        self._collect(*self._runner.on_generation_end(), is_new=True)
        self.wall_s += time.perf_counter() - started

    def _collect(
        self, found: Sequence[Finding], events: Sequence[EventRecord], *, is_new: bool
    ) -> None:
        self.events += events
        if is_new:
            self.found += [
                f
                for f in found
                if self.known_findings is None or _finding_key(f) not in self.known_findings
            ]

    def to_reviewed(self, generation: int, started_at: float) -> RuleReview:
        """Return what the rule said of the generation."""
        said = (tuple(self.found), tuple(self.events))
        return RuleReview(self.rule.name, generation, *said, started_at, self.wall_s * 1e3)


# -- in a process of its own -----------------------------------------------------------------------


def review_command(path: Path) -> list[str]:
    """Return the command that reviews a trace in a process of its own; see `review_from_json`."""
    return [sys.executable, "-m", "flexinspect.analysis.offline_rules", str(path)]


def review_to_json(review: Review) -> str:
    """Return a review as text, for `review_from_json`."""
    return to_json({**asdict(review), "unstored": [asdict(one) for one in review.unstored]})


def review_from_json(text: str) -> Review:
    """Return the review that the command printed. Raises `ValueError` for anything else."""
    said = from_json(text)
    try:
        unstored = tuple(_reviewed_from_json(one) for one in said["unstored"])
        return Review(int(said["n_rules"]), unstored, str(said["note"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no review: {error}") from None


def _reviewed_from_json(fields: dict[str, Any]) -> RuleReview:
    findings = tuple(_finding_from_json(one) for one in fields.pop("findings"))
    events = tuple(EventRecord(**one) for one in fields.pop("events"))
    return RuleReview(findings=findings, events=events, **fields)


def _finding_from_json(fields: dict[str, Any]) -> Finding:
    lists = {name: tuple(fields[name]) for name in ("positions", "layers")}
    return Finding(**{**fields, **lists, "severity": Severity(fields["severity"])})


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
    print(review_to_json(done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
