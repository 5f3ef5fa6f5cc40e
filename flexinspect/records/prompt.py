"""Composition of a prompt on token ids: pieces are joined as ids, and text is never re-tokenised.

A prompt is BOS, a shared text, the paraphrases with a separator after each, and a cue. Every token
of it belongs to exactly one `Segment`, so positions are true for the ids that are fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from flexinspect.core.errors import UsageError


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


Span = tuple[int, int]
"""Positions `start <= pos < stop`."""


@dataclass(frozen=True, slots=True)
class DeclaredSegment:
    """A piece as it was declared: a span, or a `text` with the `ids` that it encodes to alone.

    Of a text `start` and `stop` are 0; `ids` is empty where nothing could encode it.
    """

    label: str
    start: int = 0
    stop: int = 0
    text: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a tokenizer, or the model's configuration, says of special tokens.

    `adds_bos` tells whether the tokenizer puts a BOS before a text by default, None when there was
    no tokenizer to ask; `adds_eos` whether it puts an EOS behind one, and no chat template of its
    own ends turns so. `special` gives the ids of special tokens by their characters: those whose
    characters occur among the words of the prompt, as a vocabulary may have hundreds.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    adds_bos: bool | None = None
    adds_eos: bool = False
    special: Mapping[str, int] = field(default_factory=dict)


DECLARED_SEGMENT_KEYS = ("pieces", "words")
"""The names in `GenerationRecord.declared` that say nothing of a mask."""


def declaration_entries(
    segments: Sequence[DeclaredSegment], tokenizer: TokenizerFacts
) -> dict[str, Any]:
    """Return pieces and facts as they stand in `GenerationRecord.declared`, without empty ones."""
    said = {
        "bos": tokenizer.bos,
        "eos": list(tokenizer.eos) or None,
        "pad": tokenizer.pad,
        "adds_bos": tokenizer.adds_bos,
        "adds_eos": tokenizer.adds_eos or None,
        "special": dict(tokenizer.special) or None,
    }
    words = {name: value for name, value in said.items() if value is not None}
    parts = {"pieces": [_segment_to_json(piece) for piece in segments], "words": words}
    return {name: part for name, part in parts.items() if part}


def _segment_to_json(segment: DeclaredSegment) -> dict[str, Any]:
    if segment.text is None:
        return {"label": segment.label, "start": segment.start, "stop": segment.stop}
    return {"label": segment.label, "text": segment.text, "ids": list(segment.ids)}


def declared_segments(declared: Mapping[str, Any]) -> tuple[DeclaredSegment, ...]:
    """Return the pieces of a declaration, in the order they were given."""
    return tuple(
        DeclaredSegment(
            str(one.get("label", "")),
            int(one.get("start", 0)),
            int(one.get("stop", 0)),
            one.get("text"),
            tuple(one.get("ids", ())),
        )
        for one in declared.get("pieces", ())
    )


def declared_tokenizer(declared: Mapping[str, Any]) -> TokenizerFacts:
    """Return what a declaration says of special tokens."""
    said = declared.get("words", {})
    return TokenizerFacts(
        said.get("bos"),
        tuple(said.get("eos", ())),
        said.get("pad"),
        said.get("adds_bos"),
        bool(said.get("adds_eos", False)),
        dict(said.get("special", {})),
    )


def find_id_spans(ids: Sequence[int], within: Sequence[int], after: int = 0) -> Iterator[Span]:
    """Yield where ids lie in others, from index `after` on, each as (start, stop)."""
    wanted, whole = list(ids), list(within)
    for start in range(after, len(whole) - len(wanted) + 1):
        if wanted and whole[start : start + len(wanted)] == wanted:
            yield start, start + len(wanted)


def find_text_spans(text: str, texts: Sequence[str], after: int = 0) -> Iterator[Span]:
    """Yield where a text lies in what tokens add, from token `after` on, each as (start, stop).

    Every token that holds a part of it is taken whole.
    """
    whole, begin = "".join(texts[after:]), -1
    while text and (begin := whole.find(text, begin + 1)) >= 0:
        yield _covering_tokens(begin, begin + len(text), texts, after)


def _covering_tokens(begin: int, end: int, texts: Sequence[str], after: int) -> Span:
    held: list[int] = []
    at = 0
    for index, part in enumerate(texts[after:], start=after):
        # A token that ends inside a character adds nothing; the character comes with a later one.
        if (at < end and at + len(part) > begin) or (not part and begin <= at < end):
            held.append(index)
        at += len(part)
        if at >= end:
            break
    return held[0], held[-1] + 1
