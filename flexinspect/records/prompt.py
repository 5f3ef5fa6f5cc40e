"""Prompts as token ids: composition from pieces, declared segments, and the search for pieces.

A composed prompt is BOS, a shared text, the paraphrases with a separator after each, and a cue. The
pieces are joined as ids and never re-tokenized, and every token belongs to exactly one `Segment`,
so positions are those of the ids that the model receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.core.errors import UsageError


class SegmentKind(StrEnum):
    """The purpose of a span of the sequence."""

    BOS = "bos"
    SHARED = "shared"
    PARAPHRASE = "paraphrase"
    SEPARATOR = "separator"
    CUE = "cue"
    GENERATED = "generated"


class Segment(Struct, frozen=True):
    """Positions `start <= pos < stop` of a sequence.

    `owner` is the index of the segment this one belongs to for masking: itself, except for a
    separator, which belongs to the piece before it. The `stop` of the generated segment is the
    highest position that generation may reach, until it has ended.
    """

    start: int
    stop: int
    label: str
    kind: SegmentKind
    owner: int

    def __len__(self) -> int:
        return self.stop - self.start


class PromptTokenIds(Struct, frozen=True):
    """Token ids of each piece, encoded once and without special tokens."""

    bos: tuple[int, ...]
    shared: tuple[int, ...]
    paraphrases: tuple[tuple[int, ...], ...]
    separator: tuple[int, ...]
    cue: tuple[int, ...]


class Prompt(Struct, frozen=True):
    """The prompt that the model receives: `ids`, one of `position_ids` per id, and `segments`.

    The segments are in order and without gaps; the last one is the generated segment, which starts
    at `len(ids)`.
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
    """Join pieces into a prompt with typed segments.

    `positions` is `contiguous` (0, 1, 2, ... over the whole sequence) or `reset` (every paraphrase
    starts again right after BOS and the shared text, and the cue continues after the longest one,
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
    """Return the index of the segment that contains `pos` (the last one beyond all segments)."""
    for index, segment in enumerate(segments):
        if segment.start <= pos < segment.stop:
            return index
    return len(segments) - 1


def close_generated_segment(segments: Sequence[Segment], n_tokens: int) -> tuple[Segment, ...]:
    """Return the segments with the stop of the generated one set to the true length `n_tokens`."""
    return (*segments[:-1], replace(segments[-1], stop=max(n_tokens, segments[-1].start)))


Span = tuple[int, int]
"""Positions `start <= pos < stop`."""


class DeclaredSegment(Struct, frozen=True):
    """A declared segment: a span, or a `text` with the `ids` that it encodes to by itself.

    `start` and `stop` of a text are 0; its `ids` are empty if there was no tokenizer.
    """

    label: str
    start: int = 0
    stop: int = 0
    text: str | None = None
    ids: tuple[int, ...] = ()


class TokenizerFacts(Struct, frozen=True):
    """The special tokens of a tokenizer, or of the model's configuration.

    `adds_bos` is whether the tokenizer prepends a BOS by default (None without a tokenizer),
    `adds_eos` whether it appends an EOS and no chat template of its own ends turns with one.
    `special` maps the characters of special tokens to ids: only of those whose characters occur in
    the text of the prompt, because a vocabulary may have hundreds.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    adds_bos: bool | None = None
    adds_eos: bool = False
    special: Mapping[str, int] = field(default_factory=dict)


DECLARED_SEGMENT_KEYS = ("segments", "tokenizer")
"""The keys of `GenerationRecord.declared` that do not describe a mask."""


def declaration_entries(
    segments: Sequence[DeclaredSegment], tokenizer: TokenizerFacts
) -> dict[str, Any]:
    """Return segments and tokenizer facts as entries of `GenerationRecord.declared`, if any."""
    facts = {
        "bos": tokenizer.bos,
        "eos": list(tokenizer.eos) or None,
        "pad": tokenizer.pad,
        "adds_bos": tokenizer.adds_bos,
        "adds_eos": tokenizer.adds_eos or None,
        "special": dict(tokenizer.special) or None,
    }
    words = {name: value for name, value in facts.items() if value is not None}
    parts = {"segments": [_segment_to_json(piece) for piece in segments], "tokenizer": words}
    return {name: part for name, part in parts.items() if part}


def _segment_to_json(segment: DeclaredSegment) -> dict[str, Any]:
    if segment.text is None:
        return {"label": segment.label, "start": segment.start, "stop": segment.stop}
    return {"label": segment.label, "text": segment.text, "ids": list(segment.ids)}


def declared_segments(declared: Mapping[str, Any]) -> tuple[DeclaredSegment, ...]:
    """Return the segments of a declaration, in order."""
    return tuple(
        DeclaredSegment(
            label=str(piece.get("label", "")),
            start=int(piece.get("start", 0)),
            stop=int(piece.get("stop", 0)),
            text=piece.get("text"),
            ids=tuple(piece.get("ids", ())),
        )
        for piece in declared.get("segments", ())
    )


def declared_tokenizer(declared: Mapping[str, Any]) -> TokenizerFacts:
    """Return the tokenizer facts of a declaration."""
    words = declared.get("tokenizer", {})
    return TokenizerFacts(
        bos=words.get("bos"),
        eos=tuple(words.get("eos", ())),
        pad=words.get("pad"),
        adds_bos=words.get("adds_bos"),
        adds_eos=bool(words.get("adds_eos", False)),
        special=dict(words.get("special", {})),
    )


def find_id_spans(ids: Sequence[int], within: Sequence[int], after: int = 0) -> Iterator[Span]:
    """Yield each occurrence of `ids` in `within`, from index `after` on, as (start, stop)."""
    wanted, whole = list(ids), list(within)
    for start in range(after, len(whole) - len(wanted) + 1):
        if wanted and whole[start : start + len(wanted)] == wanted:
            yield start, start + len(wanted)


def find_text_spans(text: str, texts: Sequence[str], after: int = 0) -> Iterator[Span]:
    """Yield each occurrence of `text` in the joined `texts` of tokens, from token `after` on.

    As (start, stop) of all tokens that contain a part of it.
    """
    whole, begin = "".join(texts[after:]), -1
    while text and (begin := whole.find(text, begin + 1)) >= 0:
        yield _covering_tokens(begin, begin + len(text), texts, after)


def _covering_tokens(begin: int, end: int, texts: Sequence[str], after: int) -> Span:
    covering: list[int] = []
    at = 0
    for index, part in enumerate(texts[after:], start=after):
        # A token that ends inside a character adds no text; a later token adds the character.
        if (at < end and at + len(part) > begin) or (not part and begin <= at < end):
            covering.append(index)
        at += len(part)
        if at >= end:
            break
    return covering[0], covering[-1] + 1
