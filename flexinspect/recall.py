"""What the rules of a branch have to know of its parents: their steps before the fork."""

from __future__ import annotations

from pathlib import Path

from flexinspect.errors import TraceError
from flexinspect.records import EventRecord
from flexinspect.rules.base import RuleBook
from flexinspect.trace.callranges import lineage
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import steps


def recall(path: Path, generation: int, branch: int, book: RuleBook) -> list[EventRecord]:
    """Show a book the steps before a branch begins, oldest first; returns who failed at it.

    What they find there was said of the parent. A trace that cannot be read shows nothing.
    """
    try:
        with TraceReader(path) as reader:
            return list(recalled(reader, generation, branch, book))
    except TraceError:
        return []


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
