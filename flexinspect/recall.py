"""What the rules of a branch have to know of its parents: their steps before the fork."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flexinspect.errors import TraceError
from flexinspect.records import EventRecord, GenerationRecord, StepRecord
from flexinspect.rules.base import RuleRunner
from flexinspect.trace.branchfacts import generation_in_branch
from flexinspect.trace.callranges import lineage
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import generation_at_start, replay_steps
from flexinspect.trace.rows import BranchRow, GenerationRow
from flexinspect.trace.sequences import read_tokens


def replay_parents_from_path(
    path: Path, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Show a book the steps before a branch begins, oldest first; returns who failed at it.

    What they find there was said of the parent. A trace that cannot be read shows nothing.
    """
    try:
        with TraceReader(path) as reader:
            return list(replay_parents(reader, generation, branch, runner))
    except TraceError:
        return []


def read_step(path: Path, generation: int, step: int, branch: int) -> StepRecord | None:
    """Return a step as it was written, None where it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return reader.record(generation, step, branch)
    except TraceError:
        return None


def replay_parents(
    reader: TraceReader, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Do as `recall` does, with a trace that is open. Raises `TraceError`."""
    events: list[EventRecord] = []
    for parent, _, stop in reversed(lineage(reader, generation, branch)[1:]):
        for step in replay_steps(reader, generation, parent, runner.streams):
            if stop is not None and step.step >= stop:
                break
            events += runner.replay_parent_step(step)
    return events


def branch_start_record(
    reader: TraceReader, generation: GenerationRow, row: BranchRow
) -> GenerationRecord:
    """Return a generation as a branch finds it when it begins: its mask, and what is given.

    Where all keys are computed anew, the tokens before the fork are given, as a prompt is.
    """
    begun = generation_at_start(reader, generation_in_branch(reader, generation, row.branch))
    if row.change.get("recomputed") is not True:
        return begun
    step = row.fork_step or 0
    earlier = read_tokens(reader, generation.generation, row.branch)
    given = [replace(t, step=None) for t in earlier if t.step is not None and t.step < step]
    return replace(begun, tokens=(*begun.tokens, *given))
