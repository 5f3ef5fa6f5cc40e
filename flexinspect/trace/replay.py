"""Replay a recorded generation step by step, as rules saw it while it was recorded.

Steps are loaded many at a time (see `flexinspect.trace.reader`), with only those arrays that
the rules ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from flexinspect.core.errors import TraceError
from flexinspect.records import step as steps
from flexinspect.records.step import EventRecord, GenerationRecord, GradientRecord, StepRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.queries import generation_in_branch, lineage, read_tokens
from flexinspect.trace.query_results import BranchRow, GenerationRow
from flexinspect.trace.reader import TraceReader, load_steps, read_all_gradients
from flexinspect.trace.schema import GENERATIONS


def is_standalone(generation: GenerationRow) -> bool:
    """Tell whether a generation holds standalone calls of FlexAttention, outside of any model."""
    name = generation.sample_id
    outside = (steps.STANDALONE_MASKS, steps.STANDALONE_RAISED)
    return name in outside or name.startswith(steps.STANDALONE_CALLS)


def replay(
    reader: TraceReader, generation: int, streams: Collection[str] = (), branch: int = 0
) -> Iterator[StepRecord | EventRecord | GradientRecord]:
    """Yield the own steps of a branch, and for branch 0 the events that belong to no step.

    Both come in the order in which they were recorded, and the gradients of tokens after all steps.
    Of the steps' own arrays only those of `streams` are loaded (`ALL_STREAMS`: all); findings are
    left out. Raises `TraceError`.
    """
    rows = [] if branch else reader.events(generation=generation)
    events = deque(row.event for row in rows if row.branch is None)
    for step in replay_steps(reader, generation, branch, streams):
        ended_at = step.started_at + step.wall_ms / 1e3
        while events and not events[0].at > ended_at:
            yield events.popleft()
        yield step
    yield from read_all_gradients(reader, generation, branch)
    yield from events


def replay_steps(
    reader: TraceReader,
    generation: int,
    branch: int,
    streams: Collection[str] = (),
    *,
    mask_arrays: bool = True,
) -> Iterator[StepRecord]:
    """Yield the steps of one branch, in order, without findings; see `replay`."""
    start, read = 0, partial(load_steps, streams=streams, mask_arrays=mask_arrays)
    while steps := read(reader, generation, branch, start):
        yield from steps
        start = steps[-1].step + 1


def replay_parents_from_path(
    path: Path, generation: int, branch: int, runner: RuleRunner
) -> list[EventRecord]:
    """Do as `replay_parents`, with the trace at `path`; without effect if it cannot be read."""
    with suppress(TraceError), TraceReader(path) as reader:
        return replay_parents(reader, generation, branch, runner)
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
    with suppress(TraceError), TraceReader(path) as reader:
        return reader.record(generation, step, branch)
    return None


def branch_start_record(
    reader: TraceReader, generation: GenerationRow, row: BranchRow
) -> GenerationRecord:
    """Return a generation as it is at the start of a branch: its mask and its prompt.

    Where the branch recomputes all keys, the generated tokens before the fork count as prompt.
    """
    about = generation_in_branch(reader, generation, row.branch)
    prompt = [token for token in reader.tokens(about.generation) if token.step is None]
    if row.change.get("recomputed") is True:
        fork_step = row.fork_step or 0
        prompt += [
            replace(token, step=None)
            for token in read_tokens(reader, about.generation, row.branch)
            if token.step is not None and token.step < fork_step
        ]
    return GenerationRecord(
        **{name: getattr(about, name) for name in GENERATIONS.names},
        segments=tuple(reader.segments(about.generation)),
        tokens=tuple(prompt),
    )
