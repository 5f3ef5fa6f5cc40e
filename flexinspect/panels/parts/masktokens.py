"""Words of the tokens along the axes of a mask: only those that are shown are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexinspect.panels.base import Place
from flexinspect.panels.parts.sequence import band
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment
from flexinspect.trace.sequences import last_pos, tokens_of
from flexinspect.widgets.tokencells import Word, shown

_TOGETHER = 256
"""Tokens that are kept together."""


def load_words(
    source: Source, place: Place, segments: tuple[Segment, ...], positions: Iterable[int]
) -> dict[int, Word]:
    """Return the tokens at some positions, as far as there are any. Raises `TraceError`."""
    last = last_pos(source.reader, place.generation, place.branch) or 0
    starts = tuple(segment.start for segment in segments)
    found: dict[int, Word] = {}
    wanted = sorted(set(positions))
    for start in sorted({position // _TOGETHER * _TOGETHER for position in wanted}):
        stop = min(start + _TOGETHER, last + 1)
        key = ("mask.words", place.generation, place.branch, start, stop, starts)
        words = source.keep(
            key, _Reading(source, place, segments, (start, stop)).words, lambda w: 200 * len(w)
        )
        found |= {p: words[p] for p in wanted if start <= p < stop and p in words}
    return found


@dataclass(frozen=True, slots=True)
class _Reading:
    source: Source
    place: Place
    segments: tuple[Segment, ...]
    span: tuple[int, int]

    def words(self) -> dict[int, Word]:
        """Return the words of the span; a branch has its own ones, and its parent's before."""
        words: dict[int, Word] = {}
        reader, place = self.source.reader, self.place
        for token in tokens_of(reader, place.generation, place.branch, *self.span):
            text, invisible = shown(token.token, token.text, special=token.special)
            band = band_of(self.segments, token.pos)
            words[token.pos] = Word(token.pos, text, band, token.special, invisible)
        return words


def band_of(segments: Sequence[Segment], position: int) -> int:
    """Return the colour of a position's segment, -1 for separators."""
    return band(segment_number(segments, position), segments)


def segment_number(segments: Sequence[Segment], position: int) -> int:
    """Return the number of the segment of a position (the last one beyond the end), or -1.

    `segments` are in order of their starts.
    """
    return bisect_right(segments, position, key=lambda segment: segment.start) - 1
