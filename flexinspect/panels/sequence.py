"""The tokens around a place, ready to be drawn: what the strip and the tokens panel share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexinspect.panels.base import Missing, Place
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import TokenRecord
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import StepRow
from flexinspect.trace.sequences import last_pos
from flexinspect.widgets.tokencells import Word, shown


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `start <= pos` of a sequence, with what their steps say.

    `current` is the position that the place stands on, None when its step chose none; `by_step` the
    steps that chose tokens of the window.
    """

    tokens: tuple[TokenRecord, ...]
    segments: tuple[Segment, ...]
    by_step: dict[int, StepRow]
    current: int | None
    n_tokens: int

    @property
    def start(self) -> int:
        """First position of the window."""
        return self.tokens[0].pos if self.tokens else 0


def current_pos(reader: TraceReader, place: Place) -> int | None:
    """Return the position that a place stands on."""
    if place.pos is not None:
        return place.pos
    step = reader.step(place.generation, place.step, place.branch)
    return step.last_pos if step else None


def load_window(reader: TraceReader, place: Place, reach: int) -> Window:
    """Return at most `2 * reach` tokens around the place, all of a shorter sequence.

    Raises `Missing` when the generation has no tokens.
    """
    current = current_pos(reader, place)
    last = last_pos(reader, place.generation, place.branch)
    if last is None:
        raise Missing("This generation has no tokens yet.")
    middle = last if current is None else current
    start = max(0, min(middle - reach, last + 1 - 2 * reach))
    # Anchored, so that the rows do not run away under the eye at every step.
    start -= start % 64
    tokens = reader.tokens(place.generation, place.branch, start, limit=2 * reach + 64)
    chosen = [token.step for token in tokens if token.step is not None]
    steps: list[StepRow] = []
    if chosen:
        steps = reader.steps(place.generation, place.branch, min(chosen), max(chosen) + 1)
    segments = tuple(reader.segments(place.generation, place.branch))
    by_step = {step.step: step for step in steps}
    return Window(tuple(tokens), segments, by_step, current, last + 1)


def words(window: Window, colour: str) -> list[Word]:
    """Return the window's tokens as words; `colour` is segment, probability or entropy."""
    return [_word(token, window, colour) for token in window.tokens]


def _word(token: TokenRecord, window: Window, colour: str) -> Word:
    text, invisible = shown(token.token, token.text, special=token.special)
    step = window.by_step.get(token.step) if token.step is not None else None
    heat = None if step is None else heat_of(step, colour)
    return Word(token.pos, text, _band(token.segment, window), token.special, invisible, heat)


def _band(number: int, window: Window) -> int:
    known = 0 <= number < len(window.segments)
    return -1 if known and window.segments[number].kind == SegmentKind.SEPARATOR else number


def heat_of(step: StepRow, colour: str) -> float | None:
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
