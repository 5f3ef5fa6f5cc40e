"""What the rules of a branch have to know of its parents: their steps before the fork."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flexinspect.errors import TraceError
from flexinspect.records import EventRecord, GenerationRecord, StepRecord
from flexinspect.rules.base import RuleBook
from flexinspect.trace.branchfacts import in_branch
from flexinspect.trace.callranges import lineage
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import beginning, steps
from flexinspect.trace.rows import BranchRow, GenerationRow
from flexinspect.trace.sequences import tokens_of


def recall(path: Path, generation: int, branch: int, book: RuleBook) -> list[EventRecord]:
    """Show a book the steps before a branch begins, oldest first; returns who failed at it.

    What they find there was said of the parent. A trace that cannot be read shows nothing.
    """
    try:
        with TraceReader(path) as reader:
            return list(recalled(reader, generation, branch, book))
    except TraceError:
        return []


def recorded(path: Path, generation: int, step: int, branch: int) -> StepRecord | None:
    """Return a step as it was written, None where it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return reader.record(generation, step, branch)
    except TraceError:
        return None


def recalled(
    reader: TraceReader, generation: int, branch: int, book: RuleBook
) -> list[EventRecord]:
    """Do as `recall` does, with a trace that is open. Raises `TraceError`."""
    events: list[EventRecord] = []
    for parent, _, stop in reversed(lineage(reader, generation, branch)[1:]):
        for step in steps(reader, generation, parent, book.streams):
            if stop is not None and step.step >= stop:
                break
            events += book.recall(step)
    return events


def branch_beginning(reader: TraceReader, about: GenerationRow, row: BranchRow) -> GenerationRecord:
    """Return a generation as a branch finds it when it begins: its mask, and what is given.

    Where all keys are computed anew, the tokens before the fork are given, as a prompt is.
    """
    begun = beginning(reader, in_branch(reader, about, row.branch))
    if row.change.get("recomputed") is not True:
        return begun
    step = row.fork_step or 0
    earlier = tokens_of(reader, about.generation, row.branch)
    given = [replace(t, step=None) for t in earlier if t.step is not None and t.step < step]
    return replace(begun, tokens=(*begun.tokens, *given))
