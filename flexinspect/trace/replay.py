"""Replay a recorded generation step by step, as rules saw it while it was recorded.

Steps are loaded many at a time (see `flexinspect.trace.reader`), with only those arrays that
the rules ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec.structs import replace

from flexinspect.core.errors import TraceError
from flexinspect.records import step as steps
from flexinspect.records.step import EventRecord, GenerationRecord, StepRecord
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.queries.branch_queries import generation_in_branch
from flexinspect.trace.queries.range_queries import lineage
from flexinspect.trace.queries.search_queries import read_tokens
from flexinspect.trace.query_results import BranchRow, GenerationRow
from flexinspect.trace.reader import TraceReader, load_steps, read_all_gradients


def is_standalone(generation: GenerationRow) -> bool:
    """Tell whether a generation holds standalone calls of FlexAttention, outside of any model."""
    name = generation.sample_id
    outside = (steps.STANDALONE_MASKS, steps.STANDALONE_RAISED)
    return name in outside or name.startswith(steps.STANDALONE_CALLS)


def generation_at_start(reader: TraceReader, row: GenerationRow) -> GenerationRecord:
    """Return a generation as it was at its start: prompt tokens, segments and declaration."""
    tokens = reader.tokens(row.generation)
    return GenerationRecord(
        generation=row.generation,
        sample_id=row.sample_id,
        mask=row.mask,
        positions=row.positions,
        segments=tuple(reader.segments(row.generation)),
        tokens=tuple(token for token in tokens if token.step is None),
        expected=row.expected,
        declared=row.declared,
        started_at=row.started_at,
        model=row.model,
    )


def replay(
    reader: TraceReader, generation: int, streams: Collection[str] = ()
) -> Iterator[StepRecord | EventRecord | GradientRecord]:
    """Yield the steps of a generation's first branch, and its events that belong to no step.

    Both come in the order in which they were recorded, and the gradients of tokens after all steps.
    `replay_steps` yields the steps of other branches. Of the steps' own arrays only those of
    `streams` are loaded (`ALL_STREAMS`: all); findings are left out. Raises `TraceError`.
    """
    rows = reader.events(generation=generation)
    events = deque(row.event for row in rows if row.branch is None)
    for step in replay_steps(reader, generation, 0, streams):
        ended_at = step.started_at + step.wall_ms / 1e3
        while events and not events[0].at > ended_at:
            yield events.popleft()
        yield step
    yield from read_all_gradients(reader, generation)
    yield from events


def replay_steps(
    reader: TraceReader, generation: int, branch: int, streams: Collection[str] = ()
) -> Iterator[StepRecord]:
    """Yield the steps of one branch, in order, without findings; see `replay`."""
    start = 0
    while steps := load_steps(reader, generation, branch, start, streams=streams):
        yield from steps
        start = steps[-1].step + 1


def replay_parents_from_path(
    path: Path, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Do as `replay_parents`, with the trace at `path`; without effect if it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return list(replay_parents(reader, generation, branch, runner))
    except TraceError:
        return []


def replay_parents(
    reader: TraceReader, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Replay the steps before the fork of a branch for its rules, oldest first.

    Their findings are dropped, because they belong to the parent branches. Returns the events of
    rules that failed. Raises `TraceError`.
    """
    events: list[EventRecord] = []
    for parent, _, stop in reversed(lineage(reader, generation, branch)[1:]):
        for step in replay_steps(reader, generation, parent, runner.streams):
            if stop is not None and step.step >= stop:
                break
            events += runner.replay_parent_step(step)
    return events


def read_step(path: Path, generation: int, step: int, branch: int) -> StepRecord | None:
    """Return a recorded step of the trace at `path`, None if it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return reader.record(generation, step, branch)
    except TraceError:
        return None


def branch_start_record(
    reader: TraceReader, generation: GenerationRow, row: BranchRow
) -> GenerationRecord:
    """Return a generation as it is at the start of a branch: its mask and its prompt.

    Where the branch recomputes all keys, the generated tokens before the fork count as prompt.
    """
    start = generation_at_start(reader, generation_in_branch(reader, generation, row.branch))
    if row.change.get("recomputed") is not True:
        return start
    fork_step = row.fork_step or 0
    recomputed = [
        replace(token, step=None)
        for token in read_tokens(reader, generation.generation, row.branch)
        if token.step is not None and token.step < fork_step
    ]
    return replace(start, tokens=(*start.tokens, *recomputed))
