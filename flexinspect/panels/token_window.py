"""The tokens around a place, ready to be drawn: what the strip and the tokens panel share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexinspect.drawing.token_cells import TokenCell, display_text
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import TokenRecord
from flexinspect.trace.queries.range_queries import branch_of_step, lineage, step_range
from flexinspect.trace.queries.search_queries import last_pos, read_tokens
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import StepRow

CHUNK_TOKENS = 64
"""Tokens that are read, made into words and kept together."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """`CHUNK` neighbouring tokens (fewer at the end), and the steps that chose them.

    `words` holds what they look like, by colour, once somebody asked.
    """

    tokens: tuple[TokenRecord, ...]
    by_step: dict[int, StepRow]
    cells: dict[str, list[TokenCell]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens of a sequence around a place, with what their steps say.

    `current` is the position that the place stands on, None when its step chose none.
    """

    chunks: tuple[TokenChunk, ...]
    segments: tuple[Segment, ...]
    current: int | None
    n_tokens: int

    @property
    def tokens(self) -> list[TokenRecord]:
        """All tokens, in order."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def start(self) -> int:
        """First position of the window."""
        return self.chunks[0].tokens[0].pos

    @property
    def stop(self) -> int:
        """Position after the last of the window."""
        return self.chunks[-1].tokens[-1].pos + 1

    def token(self, pos: int) -> TokenRecord | None:
        """Return the token at a position, None outside of the window."""
        for chunk in self.chunks:
            if chunk.tokens[0].pos <= pos <= chunk.tokens[-1].pos:
                return chunk.tokens[pos - chunk.tokens[0].pos]
        return None

    def step_of(self, token: TokenRecord) -> StepRow | None:
        """Return the step that chose a token, None for one of the prompt."""
        if token.step is None:
            return None
        found = (chunk.by_step.get(token.step) for chunk in self.chunks)
        return next((step for step in found if step is not None), None)


def current_pos(reader: TraceReader, place: TracePlace) -> int | None:
    """Return the position that a place stands on."""
    if place.pos is not None:
        return place.pos
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    step = reader.step(place.generation, place.step, branch)
    return step.last_pos if step else None


def load_token_window(source: Source, place: TracePlace, reach: int) -> TokenWindow:
    """Return the tokens about `reach` before and after the place, all of a shorter sequence.

    Raises `Missing` when the generation has no tokens.
    """
    reader = source.reader
    current = current_pos(reader, place)
    last = last_pos(reader, place.generation, place.branch)
    if last is None:
        raise Missing("This generation has no tokens yet.")
    middle = last if current is None else min(current, last)
    first = max(0, min(middle - reach, last + 1 - 2 * reach)) // CHUNK_TOKENS
    final = min(max(middle + reach, 2 * reach), last) // CHUNK_TOKENS
    chunks = (_load_chunk(source, place, number, last) for number in range(first, final + 1))
    found = tuple(chunk for chunk in chunks if chunk.tokens)
    if not found:
        raise Missing("The tokens of this place are not recorded.")
    return TokenWindow(found, tuple(load_segments(reader, place)), current, last + 1)


def load_segments(reader: TraceReader, place: TracePlace) -> list[Segment]:
    """Return the segments of a place's branch, those of its parent where it has none yet."""
    for branch, _, _ in lineage(reader, place.generation, place.branch):
        if found := reader.segments(place.generation, branch):
            return found
    return []


def _load_chunk(source: Source, place: TracePlace, number: int, last: int) -> TokenChunk:
    """Read a chunk, or take it from what is kept if it is complete."""
    if (number + 1) * CHUNK_TOKENS > last:
        return _read_chunk(source.reader, place, number)
    key = ("tokens", place.generation, place.branch, number)
    return source.get_or_create(
        key, lambda: _read_chunk(source.reader, place, number), lambda _: 64 << 10
    )


def _read_chunk(reader: TraceReader, place: TracePlace, number: int) -> TokenChunk:
    where = (place.generation, place.branch)
    tokens = read_tokens(reader, *where, number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
    chosen = [token.step for token in tokens if token.step is not None]
    bounds = (min(chosen), max(chosen) + 1) if chosen else (0, 0)
    steps = step_range(reader, place.generation, *bounds, place.branch)
    return TokenChunk(tuple(tokens), {step.step: step for step in steps})


def token_cells(window: TokenWindow, colour: str) -> list[TokenCell]:
    """Return the window's tokens as words; `colour` is segment, probability or entropy."""
    found: list[TokenCell] = []
    for chunk in window.chunks:
        if colour not in chunk.cells:
            chunk.cells[colour] = [
                _token_cell(token, chunk, window.segments, colour) for token in chunk.tokens
            ]
        found += chunk.cells[colour]
    return found


def _token_cell(
    token: TokenRecord, chunk: TokenChunk, segments: Sequence[Segment], colour: str
) -> TokenCell:
    text, invisible = display_text(token.token, token.text, special=token.special)
    step = chunk.by_step.get(token.step) if token.step is not None else None
    heat = None if step is None else uncertainty(step, colour)
    return TokenCell(
        token.pos, text, segment_color(token.segment, segments), token.special, invisible, heat
    )


def segment_color(number: int, segments: Sequence[Segment]) -> int:
    """Return the colour of a segment: counted without separators, which have none (-1).

    So the first eight segments that matter, five paraphrases with what is around them, all differ.
    """
    if not 0 <= number < len(segments):
        return number
    if segments[number].kind == SegmentKind.SEPARATOR:
        return -1
    return sum(segment.kind != SegmentKind.SEPARATOR for segment in segments[:number])


def uncertainty(step: StepRow, colour: str) -> float | None:
    """Return how unsure a step was, from 0 to 1: one minus the probability, or the entropy.

    Entropy is in nats; 3 nats (as many as twenty equal choices) and more count as 1.
    """
    if colour == "probability" and step.chosen_logprob is not None:
        return 1 - math.exp(min(step.chosen_logprob, 0.0))
    if colour == "entropy" and step.entropy is not None and step.entropy == step.entropy:
        return min(step.entropy / 3, 1.0)
    return None


def segment_at(segments: Sequence[Segment], pos: int) -> Segment | None:
    """Return the segment that holds a position."""
    for segment in segments:
        if segment.start <= pos < segment.stop:
            return segment
    return segments[-1] if segments and pos >= segments[-1].start else None


def is_answer_correct(
    source: Source, branch: tuple[int, int], state: str, answer: str, expected: Sequence[str]
) -> bool | None:
    """Return whether the answer of (generation, branch) is right.

    None while it is not known: nothing was expected, or the branch is still recorded.
    """
    if not expected or state == "recording":
        return None
    # Most traces have no expected answers, so the data sets are imported only here.
    from flexinspect.inputs.datasets import is_correct_answer

    key = ("right", *branch, state)
    return source.get_or_create(key, lambda: is_correct_answer(answer, expected), lambda _: 64)
