"""Words of the tokens along the axes of a mask: only those that are shown are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexinspect.panels.base import TracePlace
from flexinspect.panels.parts.sequence import segment_color
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment
from flexinspect.trace.sequences import last_pos, read_tokens
from flexinspect.widgets.tokencells import TokenCell, display_text

_CHUNK_TOKENS = 256
"""Tokens that are kept together."""


def load_token_cells(
    source: Source, place: TracePlace, segments: tuple[Segment, ...], positions: Iterable[int]
) -> dict[int, TokenCell]:
    """Return the tokens at some positions, as far as there are any. Raises `TraceError`."""
    last = last_pos(source.reader, place.generation, place.branch) or 0
    starts = tuple(segment.start for segment in segments)
    found: dict[int, TokenCell] = {}
    needed = sorted(set(positions))
    for start in sorted({position // _CHUNK_TOKENS * _CHUNK_TOKENS for position in needed}):
        stop = min(start + _CHUNK_TOKENS, last + 1)
        key = ("mask.words", place.generation, place.branch, start, stop, starts)
        words = source.get_or_create(
            key, _TokenReader(source, place, segments, (start, stop)).read, lambda w: 200 * len(w)
        )
        found |= {p: words[p] for p in needed if start <= p < stop and p in words}
    return found


@dataclass(frozen=True, slots=True)
class _TokenReader:
    source: Source
    place: TracePlace
    segments: tuple[Segment, ...]
    span: tuple[int, int]

    def read(self) -> dict[int, TokenCell]:
        """Return the words of the span; a branch has its own ones, and its parent's before."""
        words: dict[int, TokenCell] = {}
        reader, place = self.source.reader, self.place
        for token in read_tokens(reader, place.generation, place.branch, *self.span):
            text, invisible = display_text(token.token, token.text, special=token.special)
            band = segment_color_at(self.segments, token.pos)
            words[token.pos] = TokenCell(token.pos, text, band, token.special, invisible)
        return words


def segment_color_at(segments: Sequence[Segment], position: int) -> int:
    """Return the colour of a position's segment, -1 for separators."""
    return segment_color(segment_number(segments, position), segments)


def segment_number(segments: Sequence[Segment], position: int) -> int:
    """Return the number of the segment of a position (the last one beyond the end), or -1.

    `segments` are in order of their starts.
    """
    return bisect_right(segments, position, key=lambda segment: segment.start) - 1
