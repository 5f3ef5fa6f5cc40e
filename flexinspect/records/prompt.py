"""Prompts as token ids: composition from pieces, declared segments, and the search for pieces.

A composed prompt is BOS, a shared text, the paraphrases with a separator after each, and a cue. The
pieces are joined as ids and never re-tokenized, and every token belongs to exactly one `Segment`,
so positions are those of the ids that the model receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, convert, field, to_builtins
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
    pieces = [("bos", SegmentKind.BOS, parts.bos), ("shared", SegmentKind.SHARED, parts.shared)]
    for number, paraphrase in enumerate(parts.paraphrases, start=1):
        pieces.append((f"paraphrase {number}", SegmentKind.PARAPHRASE, paraphrase))
        pieces.append((f"separator {number}", SegmentKind.SEPARATOR, parts.separator))
    ids: list[int] = []
    segments: list[Segment] = []
    for label, kind, piece in [*pieces, ("cue", SegmentKind.CUE, parts.cue)]:
        if piece:
            is_attached = kind is SegmentKind.SEPARATOR and segments
            owner = segments[-1].owner if is_attached else len(segments)
            segments.append(Segment(len(ids), len(ids) + len(piece), label, kind, owner))
            ids += piece
    if not ids:
        raise UsageError("The prompt has no tokens: give at least one non-empty --prompt.")
    stop = len(ids) + max_new_tokens
    segments.append(Segment(len(ids), stop, "generated", SegmentKind.GENERATED, len(segments)))
    return Prompt(tuple(ids), tuple(_position_ids(segments, positions)), tuple(segments))


def _position_ids(segments: Sequence[Segment], positions: str) -> list[int]:
    if positions == "contiguous":
        return list(range(segments[-1].start))
    prefix = sum(len(s) for s in segments if s.kind in (SegmentKind.BOS, SegmentKind.SHARED))
    out: list[int] = []
    longest = here = prefix
    for segment in segments[:-1]:
        if segment.kind in (SegmentKind.BOS, SegmentKind.SHARED):
            out += range(segment.start, segment.stop)
            continue
        here = {SegmentKind.PARAPHRASE: prefix, SegmentKind.CUE: longest}.get(segment.kind, here)
        out += range(here, here + len(segment))
        here += len(segment)
        longest = max(longest, here)
    return out


def generated_start(segments: Iterable[Segment]) -> int | None:
    """Return the position of the first generated token, None without generated ones."""
    return next((s.start for s in segments if s.kind is SegmentKind.GENERATED), None)


def segment_index(segments: Sequence[Segment], pos: int) -> int:
    """Return the index of the segment that contains `pos` (the last one beyond all segments)."""
    at = (index for index, segment in enumerate(segments) if segment.start <= pos < segment.stop)
    return next(at, len(segments) - 1)


def close_generated_segment(segments: Sequence[Segment], n_tokens: int) -> tuple[Segment, ...]:
    """Return the segments with the stop of the generated one set to the true length `n_tokens`."""
    return (*segments[:-1], replace(segments[-1], stop=max(n_tokens, segments[-1].start)))


Span = tuple[int, int]
"""Positions `start <= pos < stop`."""


class DeclaredSegment(Struct, frozen=True):
    """A declared segment: a span, or a `text` with the `ids` that it encodes to by itself.

    `start` and `stop` of a text are 0; its `ids` are empty if there was no tokenizer.
    """

    label: str = ""
    start: int = 0
    stop: int = 0
    text: str | None = None
    ids: tuple[int, ...] = ()


class PromptPart(Struct, frozen=True):
    """A list of token ids that the program holds as `name`, and where it is in the prompt."""

    name: str
    start: int
    stop: int


class TokenizerFacts(Struct, frozen=True, omit_defaults=True):
    """The special tokens of a tokenizer, or of the model's configuration.

    `adds_bos` is whether the tokenizer prepends a BOS by default (None without a tokenizer),
    `adds_eos` whether it appends an EOS and no chat template of its own ends turns with one.
    `special` maps the characters of special tokens to ids: only of those whose characters occur in
    the text of the prompt, because a vocabulary may have hundreds. `turn_end` is what its chat
    template writes after the text of a turn, and `answer_start` what it adds with
    `add_generation_prompt`; both are empty until the program has rendered a template.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    adds_bos: bool | None = None
    adds_eos: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    turn_end: tuple[int, ...] = ()
    answer_start: tuple[int, ...] = ()


DECLARED_SEGMENT_KEYS = ("segments", "tokenizer", "parts")
"""The keys of `GenerationRecord.declared` that do not describe a mask."""


def declaration_entries(
    segments: Sequence[DeclaredSegment], tokenizer: TokenizerFacts
) -> dict[str, Any]:
    """Return segments and tokenizer facts as entries of `GenerationRecord.declared`, if any."""
    facts = to_builtins(tokenizer)
    parts = {"segments": [_segment_to_json(each) for each in segments], "tokenizer": facts}
    return {name: part for name, part in parts.items() if part}


def _segment_to_json(segment: DeclaredSegment) -> dict[str, Any]:
    if segment.text is None:
        return {"label": segment.label, "start": segment.start, "stop": segment.stop}
    return {"label": segment.label, "text": segment.text, "ids": list(segment.ids)}


def declared_segments(declared: Mapping[str, Any]) -> tuple[DeclaredSegment, ...]:
    """Return the segments of a declaration, in order."""
    return convert(declared.get("segments", ()), tuple[DeclaredSegment, ...])


def declared_tokenizer(declared: Mapping[str, Any]) -> TokenizerFacts:
    """Return the tokenizer facts of a declaration."""
    return convert(declared.get("tokenizer", {}), TokenizerFacts)


def declared_parts(declared: Mapping[str, Any]) -> tuple[PromptPart, ...]:
    """Return the lists of the program that are parts of the prompt, by position."""
    return convert(declared.get("parts", ()), tuple[PromptPart, ...])


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
