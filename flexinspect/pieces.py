"""Declared pieces of a prompt, and where their texts lie in the tokens that were fed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
