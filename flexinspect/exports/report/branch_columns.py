"""Reads the tokens and the steps of a branch into columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct

from flexinspect.core.text import printable
from flexinspect.drawing.token_cells import display_text
from flexinspect.exports.report import contents
from flexinspect.exports.report.contents import NO_NUMBER, int_column
from flexinspect.masks.attention_row import recorded_check
from flexinspect.panels.base import Missing, NoOptions, Request, TracePlace
from flexinspect.panels.logits_panel import token_label
from flexinspect.panels.memory_panel import FIGURES
from flexinspect.panels.panel_source import Source
from flexinspect.panels.path_panel import PathPanel, describe_warnings
from flexinspect.panels.token_window import load_segments, segment_color
from flexinspect.records.prompt import Segment
from flexinspect.records.step import PATHS, UNKNOWN_PATH, CallRecord, Candidate
from flexinspect.trace import queries
from flexinspect.trace.query_results import StepRow

REPORTED_PATHS = (*PATHS, UNKNOWN_PATH)

NO_CALL = 255
"""The path of a layer without a call in a step."""
MAX_CANDIDATES = 10
MAX_NOTED_STEPS = 64
"""Steps with an unusual path that are described in words."""


class BranchSpan(Struct, frozen=True):
    """The own steps `start <= step < stop` of a branch of a generation."""

    source: Source
    generation: int
    branch: int
    start: int
    stop: int

    @property
    def query(self) -> tuple[int, int, int, int]:
        """The arguments of queries of a range of steps, behind the reader."""
        return self.generation, self.start, self.stop, self.branch

    def place(self, step: int, layer: int = 0, head: int = 0) -> TracePlace:
        """Return a place of the branch."""
        return TracePlace(self.generation, self.branch, step, layer, head)


def branch_span(source: Source, generation: int, branch: int) -> BranchSpan:
    """Return the own steps of a branch; none if it has no step of its own."""
    own = source.reader.steps(generation, branch, limit=1)
    last = source.reader.last_step(generation, branch)
    start = own[0].step if own else 0
    return BranchSpan(source, generation, branch, start, start if last is None else last + 1)


# -- tokens ---------------------------------------------------------------------------------------


def read_segments(span: BranchSpan) -> list[Segment]:
    """Return the segments of the branch in order; they may be inferred."""
    segments = load_segments(span.source.reader, span.place(span.start))
    return sorted(segments, key=lambda segment: segment.start)


def segment_parts(segments: Sequence[Segment]) -> list[contents.SegmentPart]:
    """Return segments with the numbers of their colours, and printable labels."""
    return [
        contents.SegmentPart(
            segment.start,
            segment.stop,
            printable(segment.label),
            str(segment.kind),
            segment.owner,
            segment_color(number, segments),
        )
        for number, segment in enumerate(segments)
    ]


def token_columns(span: BranchSpan) -> contents.TokenColumns:
    """Read all tokens of a branch, its parents' before the fork included."""
    tokens = queries.read_tokens(span.source.reader, span.generation, span.branch)
    shown = [display_text(one.token, one.text, special=one.special) for one in tokens]
    kinds = [
        1 if token.special else 2 if invisible else 0
        for token, (_, invisible) in zip(tokens, shown, strict=True)
    ]
    return contents.TokenColumns(
        pos=int_column(token.pos for token in tokens),
        text=[printable(text) for text, _ in shown],
        step=int_column(NO_NUMBER if token.step is None else token.step for token in tokens),
        kind=np.array(kinds, np.uint8),
        id=int_column(token.token_id for token in tokens),
    )


# -- steps ----------------------------------------------------------------------------------------


def step_columns(rows: Sequence[StepRow]) -> contents.StepColumns:
    """Return the scalar facts of steps in columns."""

    def ints(value: Callable[[StepRow], int | None]) -> contents.Ints:
        found = (value(row) for row in rows)
        return int_column(NO_NUMBER if number is None else number for number in found)

    def floats(value: Callable[[StepRow], float | None]) -> contents.Floats:
        return float_column(map(value, rows))

    return contents.StepColumns(
        step=ints(lambda row: row.step),
        phase=[printable(row.phase) for row in rows],
        q_len=ints(lambda row: row.q_len),
        kv_before=ints(lambda row: row.kv_before),
        kv_after=ints(lambda row: row.kv_after),
        wall_ms=floats(lambda row: row.wall_ms),
        capture_ms=floats(lambda row: row.capture_ms),
        entropy=floats(lambda row: row.entropy),
        margin=floats(lambda row: row.margin),
        chosen_logprob=floats(lambda row: row.chosen_logprob),
        chosen_rank=ints(lambda row: row.chosen_rank),
        chosen_id=ints(lambda row: row.chosen_id),
        pos=ints(lambda row: row.last_pos),
    )


def candidate_columns(span: BranchSpan) -> contents.CandidateColumns | None:
    """Read the most likely tokens of each step, None if none were recorded."""
    found = queries.candidates_range(span.source.reader, *span.query)
    if not found:
        return None
    rows = [one[:MAX_CANDIDATES] for one in found.values()]
    shape = (len(rows), max(map(len, rows)))
    ids = np.full(shape, NO_NUMBER, np.int32)
    logprobs, scores = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    texts: dict[str, str] = {}
    for number, candidates in enumerate(rows):
        own = slice(len(candidates))
        ids[number, own] = int_column(one.token_id for one in candidates)
        logprobs[number, own] = [one.logprob for one in candidates]
        scores[number, own] = [_score_logprob(one) for one in candidates]
        texts.update((str(one.token_id), token_label(one.text, one.token_id)) for one in candidates)
    return contents.CandidateColumns(int_column(found), ids, logprobs, scores, texts)


def _score_logprob(candidate: Candidate) -> float:
    """Return the log-probability after the processors; -Inf for a removed token."""
    return -math.inf if candidate.score == -math.inf else candidate.score_logprob


def memory_columns(span: BranchSpan) -> contents.MemoryColumns | None:
    """Read the memory at the end of each step, None if it was not recorded."""
    found = queries.memory_range(span.source.reader, *span.query)
    figures = {
        name: np.array([math.nan if n is None else n for n in map(figure, found.values())], float)
        for name, figure in FIGURES.items()
    }
    known = {name: column for name, column in figures.items() if not np.isnan(column).all()}
    return contents.MemoryColumns(int_column(found), known) if found and known else None


# -- paths ----------------------------------------------------------------------------------------


def path_columns(span: BranchSpan) -> contents.PathColumns | None:
    """Read the kernel and the check of every call, None if no call was recorded."""
    found = queries.calls_range(span.source.reader, *span.query)
    layers = sorted({call.layer for calls in found.values() for call in calls})
    if not layers:
        return None
    shape = (len(found), len(layers))
    path = np.full(shape, NO_CALL, np.uint8)
    check, failed = np.full(shape, np.nan, np.float32), np.zeros(shape, np.uint8)
    columns = {layer: number for number, layer in enumerate(layers)}
    for number, calls in enumerate(found.values()):
        for call in calls:
            at = number, columns[call.layer]
            path[at] = REPORTED_PATHS.index(call.path if call.path in REPORTED_PATHS else "other")
            if call.lse_error is not None:
                check[at] = np.fmax(check[at], call.lse_error)
            failed[at] |= recorded_check(call).is_failed
    notes = _path_notes(span, [*found], path, found)
    steps = int_column(found)
    return contents.PathColumns(steps, layers, [*REPORTED_PATHS], path, check, failed, notes)


def _path_notes(
    span: BranchSpan,
    steps: Sequence[int],
    path: contents.Bytes,
    calls: Mapping[int, Sequence[CallRecord]],
) -> dict[str, list[str]]:
    """Return the warnings of the path panel for the steps in which layers differ or failed."""
    differs = (path != path[:, :1]).any(axis=1).tolist()
    odd = [
        step
        for step, is_odd in zip(steps, differs, strict=True)
        if is_odd or any(call.suppressed_exception for call in calls[step])
    ]
    notes, panel = {}, PathPanel()
    for step in odd[:MAX_NOTED_STEPS]:
        with suppress(Missing):
            found = panel.load(span.source, Request(span.place(step), NoOptions(), width=1))
            notes[str(step)] = describe_warnings(found)
    return notes


# -- columns --------------------------------------------------------------------------------------


def float_column(values: Iterable[float | None]) -> contents.Floats:
    """Return a column of numbers, NaN for None."""
    numbers = (math.nan if value is None else value for value in values)
    with np.errstate(over="ignore"):
        return np.fromiter(numbers, np.float64).astype(np.float32)
