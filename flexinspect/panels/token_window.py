"""The tokens around a place, ready to draw: shared by the token strip and several panels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.core.text import truncate
from flexinspect.drawing.token_cells import TokenCell, TokenCellRow, display_text
from flexinspect.panels.base import Missing, Navigate, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import no_steps
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import TokenRecord
from flexinspect.trace.queries import (
    branch_of_step,
    inferred_segments,
    last_pos,
    lineage,
    n_generations,
    read_tokens,
    step_range,
)
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

MAX_INFERRED_CHARS = 16
"""Characters of an inferred segment's text that are its label."""

CHUNK_TOKENS = 64
"""Number of tokens that are read, formatted and cached together."""


class TokenChunk(Struct, frozen=True):
    """`CHUNK_TOKENS` neighbouring tokens (fewer at the end), and the steps that chose them.

    `cells` caches their token cells by colour; see `token_cells`.
    """

    tokens: tuple[TokenRecord, ...]
    by_step: dict[int, StepRow]
    cells: dict[str, list[TokenCell]] = field(default_factory=dict)


class TokenWindow(Struct, frozen=True):
    """Tokens of a sequence around a place, with the steps that chose them.

    `current` is the position of the place, None if its step chose no token.
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
        """Position after the last one of the window."""
        return self.chunks[-1].tokens[-1].pos + 1

    def token(self, pos: int) -> TokenRecord | None:
        """Return the token at a position, None outside of the window."""
        for chunk in self.chunks:
            at = bisect_left(chunk.tokens, pos, key=lambda token: token.pos)
            if at < len(chunk.tokens) and chunk.tokens[at].pos == pos:  # a damaged trace has gaps
                return chunk.tokens[at]
        return None

    def row_of_current(self, rows: Sequence[TokenCellRow]) -> int:
        """Return the index of the row with the current token, the last one if none has it."""
        positions = ([cell.pos for cell in row.cells] for row in rows)
        return next((i for i, own in enumerate(positions) if self.current in own), len(rows) - 1)

    def navigate_to(self, cell: TokenCell | None) -> Navigate | None:
        """Return the step that chose a token, or the position of a token of the prompt."""
        token = None if cell is None else self.token(cell.pos)
        if token is None:
            return None
        return Navigate(step=0, pos=token.pos) if token.step is None else Navigate(step=token.step)

    def step_of(self, token: TokenRecord) -> StepRow | None:
        """Return the step that chose a token, None for a token of the prompt."""
        if token.step is None:
            return None
        steps = (chunk.by_step.get(token.step) for chunk in self.chunks)
        return next((step for step in steps if step is not None), None)


def current_pos(reader: TraceReader, place: TracePlace) -> int | None:
    """Return the position of a place: the selected one, or that of the token its step chose."""
    if place.pos is not None:
        return place.pos
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    step = reader.step(place.generation, place.step, branch)
    return step.last_pos if step else None


def load_token_window(source: Source, place: TracePlace, reach: int) -> TokenWindow:
    """Load about `reach` tokens before and after the place; all tokens of a shorter sequence.

    Raises `Missing` when the generation has no tokens.
    """
    reader = source.reader
    current = current_pos(reader, place)
    last = last_pos(reader, place.generation, place.branch)
    if last is None:
        if not n_generations(reader):
            raise no_steps(reader)
        raise Missing("This generation has no tokens yet.")
    middle = last if current is None else min(current, last)
    first = max(0, min(middle - reach, last + 1 - 2 * reach)) // CHUNK_TOKENS
    final = min(max(middle + reach, 2 * reach), last) // CHUNK_TOKENS
    loaded = (_load_chunk(source, place, number, last) for number in range(first, final + 1))
    chunks = tuple(chunk for chunk in loaded if chunk.tokens)
    if not chunks:
        raise Missing("The tokens of this place are not recorded.")
    return TokenWindow(chunks, tuple(load_segments(reader, place)), current, last + 1)


def load_segments(reader: TraceReader, place: TracePlace) -> list[Segment]:
    """Return the segments of a place's branch, those of its nearest ancestor if it has none.

    If nobody declared any, the prompt has those that were read out of the executed mask; their
    labels end with "?".
    """
    for branch, _, _ in lineage(reader, place.generation, place.branch):
        if segments := reader.segments(place.generation, branch):
            return _with_inferred(segments, reader, place.generation)
    return []


def _with_inferred(segments: list[Segment], reader: TraceReader, generation: int) -> list[Segment]:
    kinds = {segment.kind for segment in segments}
    if not kinds <= {SegmentKind.SHARED, SegmentKind.GENERATED}:
        return segments
    inferred = [
        Segment(start, stop, f"{truncate(text, MAX_INFERRED_CHARS)}?", SegmentKind.PARAPHRASE, n)
        for n, (start, stop, text) in enumerate(inferred_segments(reader, generation))
    ]
    if not inferred:
        return segments
    rest = [segment for segment in segments if segment.kind is SegmentKind.GENERATED]
    return [*inferred, *(replace(segment, owner=len(inferred)) for segment in rest)]


def _load_chunk(source: Source, place: TracePlace, number: int, last: int) -> TokenChunk:
    """Read a chunk; a complete one, which cannot change any more, is cached.

    Of the chunk that may still grow only the newest state is, until another token is recorded.
    """
    branch = (place.generation, place.branch)
    make = partial(_read_chunk, source.reader, place, number)
    if (number + 1) * CHUNK_TOKENS > last:
        return source.get_newest(("tokens.last", *branch), (number, last), make)
    return source.get_or_create(("tokens", *branch, number), make)


def _read_chunk(reader: TraceReader, place: TracePlace, number: int) -> TokenChunk:
    span = (number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
    tokens = read_tokens(reader, place.generation, place.branch, *span)
    chosen = [token.step for token in tokens if token.step is not None]
    bounds = (min(chosen), max(chosen) + 1) if chosen else (0, 0)
    steps = step_range(reader, place.generation, *bounds, place.branch)
    return TokenChunk(tuple(tokens), {step.step: step for step in steps})


def token_cells(window: TokenWindow, colour: str) -> list[TokenCell]:
    """Return the window's tokens as cells; `colour` is "segment", "probability" or "entropy"."""
    return [
        cell for chunk in window.chunks for cell in _chunk_cells(chunk, window.segments, colour)
    ]


def load_token_cells(
    source: Source, place: TracePlace, segments: Sequence[Segment], positions: Iterable[int]
) -> dict[int, TokenCell]:
    """Return the token cells at some positions, coloured by segment, where there are tokens."""
    last = last_pos(source.reader, place.generation, place.branch)
    needed = {pos for pos in positions if 0 <= pos <= (-1 if last is None else last)}
    found: dict[int, TokenCell] = {}
    for number in sorted({pos // CHUNK_TOKENS for pos in needed}):
        chunk = _load_chunk(source, place, number, last or 0)
        cells = _chunk_cells(chunk, segments, "segment")
        found |= {cell.pos: cell for cell in cells if cell.pos in needed}
    return found


def _chunk_cells(chunk: TokenChunk, segments: Sequence[Segment], colour: str) -> list[TokenCell]:
    key = f"{colour} {len(segments)}"  # more segments may be inferred when the rules have run
    if key not in chunk.cells:
        cells = chunk.cells[key] = []
        for token in chunk.tokens:
            text, invisible = display_text(token.token, token.text, special=token.special)
            step = chunk.by_step.get(token.step) if token.step is not None else None
            cell = TokenCell(
                pos=token.pos,
                text=text,
                segment_color=segment_color(_segment_number(token, segments), segments),
                special=token.special,
                invisible=invisible,
                heat=None if step is None else uncertainty(step, colour),
            )
            cells.append(cell)
    return chunk.cells[key]


def _segment_number(token: TokenRecord, segments: Sequence[Segment]) -> int:
    """Return the recorded segment of a token, by its position if that is another one now."""
    own = token.segment
    if not 0 <= own < len(segments) or segments[own].start <= token.pos < segments[own].stop:
        return own
    inside = (n for n, one in enumerate(segments) if one.start <= token.pos < one.stop)
    return next(inside, own)


def segment_color(number: int, segments: Sequence[Segment]) -> int:
    """Return the number of a segment's colour, counted without separators, which have -1.

    So the first eight other segments, enough for five paraphrases and the rest of the prompt, all
    have different colours.
    """
    if not 0 <= number < len(segments):
        return number
    if segments[number].kind == SegmentKind.SEPARATOR:
        return -1
    return sum(segment.kind != SegmentKind.SEPARATOR for segment in segments[:number])


def uncertainty(step: StepRow, colour: str) -> float | None:
    """Return the uncertainty of a step, 0 to 1: one minus the probability, or the entropy.

    An entropy of 3 nats (that of about twenty equally likely tokens) or more counts as 1.
    """
    value = {"probability": step.chosen_logprob, "entropy": step.entropy}.get(colour)
    if value is None or math.isnan(value):
        return None
    return 1 - math.exp(min(value, 0.0)) if colour == "probability" else min(value / 3, 1.0)


def segment_at(segments: Sequence[Segment], pos: int) -> Segment | None:
    """Return the segment of a position; positions after the last segment belong to it."""
    for segment in segments:
        if segment.start <= pos < segment.stop:
            return segment
    return segments[-1] if segments and pos >= segments[-1].start else None


class Answer(Struct, frozen=True):
    """The text that a branch answered, "" before it has ended, and whether it was expected.

    `state` is that of the branch; `is_correct` is None if no answer is expected or the branch has
    not finished.
    """

    text: str
    state: str
    is_correct: bool | None


def load_answer(source: Source, place: TracePlace) -> Answer:
    """Return the answer of the place's branch. Raises `TraceError`."""
    reader = source.reader
    row = reader.generation(place.generation)
    forks = reader.branches(place.generation) if place.branch else []
    outcome = next((fork for fork in forks if fork.branch == place.branch), row)
    text, state, branch = outcome.answer, outcome.state, (place.generation, place.branch)
    return Answer(text, state, is_answer_correct(source, branch, state, text, row.expected))


def is_answer_correct(
    source: Source, branch: tuple[int, int], state: str, answer: str, expected: Sequence[str]
) -> bool | None:
    """Return the verdict on the answer of (generation, branch), see `judge_answer`."""
    if not expected:
        return None
    # Most traces have no expected answers, so the data sets are imported only here.
    from flexinspect.inputs.samples import judge_answer

    key = ("right", *branch, state)
    return source.get_or_create(key, lambda: judge_answer(state, answer, expected))
