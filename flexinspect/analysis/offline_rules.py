"""Run the rules that have not seen a trace yet, and store their findings in it.

While a run is recorded, the cheap rules check every step. The expensive ones (`offline_only`), and
those that were not installed then, run here, once per generation. If a generation or one of its
branches never ended, because its process was killed, the rules that ran live report here what they
report at the end of a generation.

`python -m flexinspect.analysis.offline_rules TRACE` does this in a separate process, so that the
interface stays responsive, and prints as JSON what could not be stored.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import FlexInspectError, TraceError, TraceWriteError
from flexinspect.records.finding import Finding, Repeat
from flexinspect.records.imported import imported_facts
from flexinspect.records.step import EventRecord, GradientRecord, StepRecord, forced_tokens
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, RuleRunner, load_rules
from flexinspect.trace.codec import from_json, to_json
from flexinspect.trace.file.writer import RuleReview, append_reviews
from flexinspect.trace.queries import unfinished_generations
from flexinspect.trace.query_results import BranchRow, GenerationRow
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.replay import branch_start_record, is_standalone, replay, replay_parents

ProgressCallback = Callable[[int, int], None]
"""Called with the number of finished steps and the number of all steps."""


class Review(Struct, frozen=True):
    """The result of running rules offline: the `unstored` reviews, and the reason in `note`.

    `n_rules` is the number of rules that ran on at least one generation.
    """

    n_rules: int
    unstored: tuple[RuleReview, ...]
    note: str


class ReviewTask(NamedTuple):
    """A generation and the rules to run on it.

    Only the findings at the end of the generation count of `end_only_rules`, which ran live.
    """

    generation: GenerationRow
    rules: tuple[Rule, ...]
    end_only_rules: tuple[Rule, ...] = ()


def pending_tasks(reader: TraceReader, rules: Sequence[Rule]) -> list[ReviewTask]:
    """Return the tasks that remain; while a trace is recorded, only of finished generations.

    A rule that needs records which an imported trace does not have is left out.
    """
    run = reader.run()
    if (facts := imported_facts(run)) is not None:
        rules = [rule for rule in rules if not facts.lacks(rule.needs)]
    is_recorded = _is_recorded(run)
    live, done = live_rule_names(run, rules), set(reader.reviews())
    tasks, unfinished = [], unfinished_generations(reader)
    for row in reader.generations():
        ended = row.generation not in unfinished
        if is_recorded and not ended:
            continue
        remaining = [rule for rule in rules if (rule.name, row.generation) not in done]
        if is_standalone(row):
            remaining = [rule for rule in remaining if rule.handles_standalone_calls]
        new = tuple(rule for rule in remaining if rule.name not in live)
        ran = (rule for rule in remaining if rule.name in live)
        default = Rule.on_generation_end
        end_only = tuple(rule for rule in ran if type(rule).on_generation_end is not default)
        if new or (end_only and not ended):
            tasks.append(ReviewTask(row, new, () if ended else end_only))
    return tasks


_SPLIT_FROM = {"repeated_kv_heads": "heads"}
"""Rules that were split from another rule. Earlier traces list only the other one."""


def live_rule_names(run: Mapping[str, Any], rules: Iterable[Rule]) -> frozenset[str]:
    """Return the names of the rules that ran live, on each step while it was recorded.

    If the manifest has no list of rules, all but the `offline_only` ones did.
    """
    named = run.get("rules")
    if isinstance(named, list):
        names = {*map(str, named)}
        return frozenset(names | {one for one, other in _SPLIT_FROM.items() if other in names})
    return frozenset(rule.name for rule in rules if not rule.offline_only)


def _is_recorded(run: Mapping[str, Any]) -> bool:
    return run.get("state") == "recording" and is_recorder_alive(run)


def review(
    reader: TraceReader,
    rules: Sequence[Rule] | None = None,
    *,
    progress: ProgressCallback | None = None,
    store: bool = True,
) -> Review:
    """Run rules (default: all registered ones) on the generations that they have not seen yet.

    The findings are stored, one transaction per generation. If that fails, `store` is False or the
    trace is still being recorded, they are returned in `unstored`. `note` names damaged
    generations. Raises `TraceError` for a trace that cannot be read at all.
    """
    tasks = pending_tasks(reader, load_rules().rules if rules is None else rules)
    sizes = [reader.n_steps(task.generation.generation) for task in tasks]
    n_before, total = 0, sum(sizes)
    unstored: list[RuleReview] = []
    notes: dict[str, None] = {}
    store = store and not _is_recorded(reader.run())
    context = RuleContext(find_mask=reader.mask)
    for task, size in zip(tasks, sizes, strict=True):

        def on_step_done(n_steps: int, n_before: int = n_before) -> None:
            if progress is not None:
                progress(min(n_before + n_steps, total), total)

        n_before += size
        try:
            reviews = _replay_generation(reader, task, context, on_step_done)
        except TraceError as error:  # the other generations may be readable
            notes[error.message] = None
            continue
        if store and not unstored:
            try:
                append_reviews(reader.path, reviews)
                continue
            except (TraceWriteError, TraceError) as error:
                notes[error.message] = None
        unstored += reviews
    names = {rule.name for task in tasks for rule in (*task.rules, *task.end_only_rules)}
    return Review(len(names), tuple(unstored), " ".join(notes))


def _replay_generation(
    reader: TraceReader, task: ReviewTask, base: RuleContext, on_step_done: Callable[[int], None]
) -> list[RuleReview]:
    """Replay one generation for all rules of a task, and return the review of each."""
    row, started_at = task.generation, time.time()
    known = {_finding_key(f) for f in reader.findings() if f.generation == row.generation}
    rules = [*((rule, None) for rule in task.rules), *((r, known) for r in task.end_only_rules)]
    replays = [_RuleReplay(rule, is_standalone(row), known) for rule, known in rules]
    for branch in reader.branches(row.generation):
        _replay_branch(reader, row, branch, replays, base, on_step_done)
    return [
        RuleReview(
            rule=each.rule.name,
            generation=row.generation,
            findings=tuple(each.found),
            events=tuple(each.events),
            at=started_at,
            wall_ms=each.wall_s * 1e3,
        )
        for each in replays
    ]


def _replay_branch(
    reader: TraceReader,
    generation: GenerationRow,
    row: BranchRow,
    replays: Sequence[_RuleReplay],
    base: RuleContext,
    on_step_done: Callable[[int], None],
) -> None:
    """Replay one branch for all rules, and add their results to `replays`.

    `on_step_done` is called after each step of the first branch.
    """
    number, n_steps = generation.generation, 0
    streams = {stream for each in replays for stream in each.rule.streams}
    context = RuleContext(find_mask=reader.mask) if row.branch else base
    forced = (forced_tokens(b.branch, b.fork_step, b.change) for b in reader.branches(number))
    context.forced_tokens = frozenset(chain.from_iterable(forced))
    start = branch_start_record(reader, generation, row)
    for each in replays:
        each.start_branch(row.branch, context)
        each.events += each.runner.on_generation_start(start)
        if row.branch and row.change.get("recomputed") is not True:
            each.events += replay_parents(reader, number, row.branch, each.runner)
    for record in replay(reader, number, streams, row.branch):
        for each in replays:
            each.on_record(record)
        if isinstance(record, StepRecord) and not row.branch:
            n_steps += 1
            on_step_done(n_steps)
    for each in replays:
        each.on_generation_end()


_finding_key = attrgetter("id", "branch", "step", "layer", "head", "sentence")


class _RuleReplay:
    """One rule with its own runner, so that its findings and its time are known.

    If `known` is set, only findings at the end that are not among these count.
    """

    def __init__(self, rule: Rule, is_standalone: bool, known: set[tuple[Any, ...]] | None) -> None:
        self.rule, self._is_standalone, self._known = rule, is_standalone, known
        self.wall_s = 0.0
        self.found: list[Finding] = []
        self.events: list[EventRecord] = []

    def start_branch(self, branch: int, context: RuleContext) -> None:
        """Begin with a branch. The rule has no state of it yet."""
        rule = type(self.rule)() if branch else self.rule
        self.runner = RuleRunner(
            [rule], is_standalone=self._is_standalone, context=context, branch=branch
        )
        self._n_found_before = len(self.found)  # findings of other branches

    def on_record(self, record: StepRecord | EventRecord | GradientRecord) -> None:
        started = time.perf_counter()
        found, repeats, events = self.runner.on_record(record)
        self.found += found
        if not isinstance(record, EventRecord):
            for repeat in repeats:
                self._count_repeat(record, repeat)
        self.events += events
        self.wall_s += time.perf_counter() - started

    def _count_repeat(self, record: StepRecord | GradientRecord, repeat: Repeat) -> None:
        """Count a repetition of an earlier finding, as the trace does."""
        series = (repeat.id, repeat.series, record.branch)
        for index, finding in enumerate(self.found):
            if (finding.id, finding.series, finding.branch) == series:
                changes: dict[str, Any] = {"times": finding.times + 1, "last_step": record.step}
                if repeat.sentence:
                    changes |= {"sentence": repeat.sentence, "evidence": repeat.evidence}
                self.found[index] = replace(finding, **changes)

    def on_generation_end(self) -> None:
        started = time.perf_counter()
        found, _, events = self.runner.on_generation_end()
        self.events += events
        if self._known is not None:  # the rule reported the rest while the run was recorded
            del self.found[self._n_found_before :]
            found = tuple(f for f in found if _finding_key(f) not in self._known)
        self.found += found
        self.wall_s += time.perf_counter() - started


def review_command(path: Path) -> list[str]:
    """Return the command that reviews a trace in a separate process; see `review_from_json`."""
    return [sys.executable, "-m", "flexinspect.analysis.offline_rules", str(path)]


def review_from_json(text: str) -> Review:
    """Return the review that the command printed.

    Raises `ValueError` (msgspec's `ValidationError` is one) for anything else.
    """
    return msgspec.convert(from_json(text), Review)


def main(argv: Sequence[str]) -> int:
    """Review the trace that the first argument names, at low priority, and print the review."""
    if hasattr(os, "nice"):
        os.nice(5)
    try:
        with open_trace(argv[0]) as reader:
            done = review(reader)
    except FlexInspectError as error:
        done = Review(0, (), error.message)
    print(to_json(done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
