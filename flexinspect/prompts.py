"""Composition of a prompt on token ids: pieces are joined as ids, and text is never re-tokenised.

A prompt is BOS, a shared text, the paraphrases with a separator after each, and a cue. Every token
of it belongs to exactly one `Segment`, so positions are true for the ids that are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from flexinspect.errors import UsageError


class SegmentKind(StrEnum):
    """What a span of the sequence is for."""

    BOS = "bos"
    SHARED = "shared"
    PARAPHRASE = "paraphrase"
    SEPARATOR = "separator"
    CUE = "cue"
    GENERATED = "generated"


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `start <= pos < stop` of a sequence.

    `owner` is the index of the segment this one belongs to for masking: itself, except for a
    separator, which belongs to the piece before it. The generated segment is open: its `stop` is
    the highest position that generation may reach.
    """

    start: int
    stop: int
    label: str
    kind: SegmentKind
    owner: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PromptTokenIds:
    """Token ids of each piece, each encoded once and without special tokens."""

    bos: tuple[int, ...]
    shared: tuple[int, ...]
    paraphrases: tuple[tuple[int, ...], ...]
    separator: tuple[int, ...]
    cue: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that are fed and what each of them is.

    `ids`: token ids, `position_ids`: one per id, `segments`: in order, without gaps, the last one
    being the generated segment that starts at `len(ids)`.
    """

    ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    segments: tuple[Segment, ...]

    def next_position(self, n_generated: int) -> int:
        """Return the position id of the generated token number `n_generated` (from 0)."""
        return max(self.position_ids, default=-1) + 1 + n_generated


POSITION_MODES = ("contiguous", "reset")


def compose_prompt(
    parts: PromptTokenIds, *, max_new_tokens: int, positions: str = "contiguous"
) -> Prompt:
    """Join the pieces into the ids that are fed, with typed segments.

    `positions` is `contiguous` (0, 1, 2, ... over the whole sequence) or `reset` (every paraphrase
    starts again right after BOS and the shared text, and the cue goes on after the longest one,
    so that the order of the paraphrases does not matter under RoPE).

    Raises `UsageError` for an empty prompt or an unknown positions mode.
    """
    if positions not in POSITION_MODES:
        raise UsageError(f"--positions {positions} is unknown; use {' or '.join(POSITION_MODES)}.")
    ids: list[int] = []
    segments: list[Segment] = []
    _append_segment(ids, segments, parts.bos, "bos", SegmentKind.BOS)
    _append_segment(ids, segments, parts.shared, "shared", SegmentKind.SHARED)
    for number, paraphrase in enumerate(parts.paraphrases, start=1):
        _append_segment(ids, segments, paraphrase, f"paraphrase {number}", SegmentKind.PARAPHRASE)
        _append_segment(
            ids, segments, parts.separator, f"separator {number}", SegmentKind.SEPARATOR
        )
    _append_segment(ids, segments, parts.cue, "cue", SegmentKind.CUE)
    if not ids:
        raise UsageError("The prompt has no tokens: give at least one non-empty --prompt.")
    generated = Segment(
        len(ids), len(ids) + max_new_tokens, "generated", SegmentKind.GENERATED, len(segments)
    )
    whole = (*segments, generated)
    return Prompt(tuple(ids), tuple(_position_ids(whole, positions)), whole)


def _append_segment(
    ids: list[int],
    segments: list[Segment],
    part_ids: Sequence[int],
    label: str,
    kind: SegmentKind,
) -> None:
    if not part_ids:
        return
    owner = len(segments)
    if kind is SegmentKind.SEPARATOR and segments:
        owner = segments[-1].owner
    segments.append(Segment(len(ids), len(ids) + len(part_ids), label, kind, owner))
    ids.extend(part_ids)


def _position_ids(segments: Sequence[Segment], positions: str) -> list[int]:
    n_prompt = segments[-1].start
    if positions == "contiguous":
        return list(range(n_prompt))
    prefix = sum(len(s) for s in segments if s.kind in (SegmentKind.BOS, SegmentKind.SHARED))
    out: list[int] = []
    longest, here = prefix, prefix
    for segment in segments[:-1]:
        if segment.kind in (SegmentKind.BOS, SegmentKind.SHARED):
            out.extend(range(segment.start, segment.stop))
            continue
        if segment.kind is SegmentKind.PARAPHRASE:
            here = prefix
        elif segment.kind is SegmentKind.CUE:
            here = longest
        out.extend(range(here, here + len(segment)))
        here += len(segment)
        longest = max(longest, here)
    return out


def segment_index(segments: Sequence[Segment], pos: int) -> int:
    """Return the index of the segment that holds `pos` (the last one for anything beyond)."""
    for index, segment in enumerate(segments):
        if segment.start <= pos < segment.stop:
            return index
    return len(segments) - 1


def close_generated_segment(segments: Sequence[Segment], n_tokens: int) -> tuple[Segment, ...]:
    """Return the segments with the generated one ended at `n_tokens`, the true length."""
    return (*segments[:-1], replace(segments[-1], stop=max(n_tokens, segments[-1].start)))
