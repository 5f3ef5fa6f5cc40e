"""Judge the trace of a run by invariants when it has ended, and leave the findings in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from flexinspect.analysis.invariants.invariant import InvariantFile, Violation
from flexinspect.analysis.invariants.learning import judge
from flexinspect.analysis.invariants.observed_run import ObservedRun, observe_run
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import RuleRunner
from flexinspect.rules.training.invariants import BROKEN_EVENT, InvariantRule
from flexinspect.trace.file.writer import RuleReview, append_reviews


def judge_trace(path: Path, contents: InvariantFile) -> list[Violation]:
    """Judge a finished trace, store a finding for each violation in it, and return these.

    Raises `UsageError` for a trace without a step, `TraceError`, and `TraceWriteError` if the
    findings could not be stored.
    """
    started = time.perf_counter()
    run = observe_run(path)
    violations = judge(contents.invariants, run)
    by_generation: dict[int, list[Violation]] = {}
    for one in violations:
        by_generation.setdefault(_generation(one, run), []).append(one)
    wall_ms = (time.perf_counter() - started) * 1e3
    append_reviews(
        path,
        [_review(generation, each, wall_ms) for generation, each in by_generation.items()],
    )
    return violations


def _generation(one: Violation, run: ObservedRun) -> int:
    """The generation of the part that an invariant is about; the first for one that is missing."""
    part = run.parts.get(one.invariant.part)
    return 0 if part is None else part[0].generation


def _review(generation: int, violations: Sequence[Violation], wall_ms: float) -> RuleReview:
    at = time.time()
    events = tuple(_event(one, generation, at) for one in violations)
    runner = RuleRunner([InvariantRule()], context=RuleContext())
    found: list[Finding] = []
    for event in events:
        found += runner.on_record(event).findings
    placed = tuple(replace(one, generation=generation) for one in found)
    return RuleReview(InvariantRule.name, generation, placed, events, at, wall_ms)


def _event(one: Violation, generation: int, at: float) -> EventRecord:
    names = ("kind", "subject", "other", "low", "high", "value", "runs", "samples")
    facts = {name: getattr(one.invariant, name) for name in names} | {"n_steps": one.n_steps}
    return EventRecord(BROKEN_EVENT, one.sentence, at, generation, one.step, facts)
