"""Facts about the words of a prompt: special tokens, padding, and texts that are not all there."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flexinspect.pieces import DeclaredSegment, Span
from flexinspect.rules.fedfacts import SPECIAL_MARK, LocatedPiece, PromptTokens

_KNOWN_SPECIALS = re.compile(r"<\|\w[\w ]{0,40}\|>|</?s>|<(?:bos|eos|pad|(?:start|end)_of_turn)>")
"""What special tokens of well-known vocabularies look like."""
_HTML_TAG = re.compile(r"</?(?:a|p|b|i|br|div|span|li|ul|td|tr|html|body)\b[^>]*>")
_MIN_CUT_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class WrittenSpecial:
    """Characters of a special token that ordinary tokens make up; `token_id` if there is one."""

    characters: str
    span: Span
    token_id: int | None


def find_written_specials(prompt: PromptTokens) -> Iterator[WrittenSpecial]:
    """Yield the special tokens that the prompt has as characters, in order."""
    if not prompt.has_text:
        return
    texts = prompt.texts
    whole = "".join(texts)
    own = "|".join(
        re.escape(name) for name in sorted(prompt.tokenizer_facts.special, key=len, reverse=True)
    )
    pattern = re.compile(f"{own}|{_KNOWN_SPECIALS.pattern}") if own else _KNOWN_SPECIALS
    is_html = _HTML_TAG.search(whole) is not None
    starts = [0, *accumulate(map(len, texts))][:-1]
    for match in pattern.finditer(whole):
        first, last = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end()) - 1
        if first == last or (is_html and match[0] in ("<s>", "</s>")):
            continue
        span = prompt.start + first, prompt.start + last + 1
        yield WrittenSpecial(match[0], span, prompt.tokenizer_facts.special.get(match[0]))


def count_leading_bos(prompt: PromptTokens) -> int:
    """Return how many BOS come first, after the padding; 1 when they may be padding."""
    ids, bos = prompt.ids[prompt.n_pads :], prompt.tokenizer_facts.bos
    n = next((n for n, id_ in enumerate(ids) if id_ != bos), len(ids))
    if (
        bos is None
        or (n > 2 and bos in (prompt.tokenizer_facts.pad, *prompt.tokenizer_facts.eos))
        or n == len(ids)
    ):
        return min(n, 1)
    return n


def find_inner_bos(prompt: PromptTokens) -> list[int]:
    """Return the positions of each BOS inside of the prompt, but for those after an EOS."""
    words, ids = prompt.tokenizer_facts, prompt.ids
    if words.bos is None or words.bos in (words.pad, *words.eos):
        return []
    first = prompt.n_pads + count_leading_bos(prompt)
    return [
        prompt.start + index
        for index, id_ in enumerate(ids)
        if id_ == words.bos and index > first and ids[index - 1] not in words.eos
    ]


def find_inner_eos(prompt: PromptTokens) -> list[int]:
    """Return where an EOS that the tokenizer adds ends a piece, or a text where none is declared.

    Only between words: at the ends of a prompt it may be padding.
    """
    words, eos = prompt.tokenizer_facts, frozenset(prompt.tokenizer_facts.eos)
    if not words.adds_eos or words.bos in eos:
        return []
    real = [index for index, id_ in enumerate(prompt.ids) if id_ not in (*eos, prompt.pad_id)]
    inside = [prompt.start + n for n in range(*(real[:1] + real[-1:])) if prompt.ids[n] in eos]
    spans = [one.span for one in prompt.located_pieces if one.span is not None]
    ends = {stop - back for _, stop in spans for back in (0, 1)}
    return [at for at in inside if at in ends or not prompt.pieces]


def is_packed(prompt: PromptTokens) -> bool:
    """Say whether the prompt ends with an EOS behind a declared piece, as packed documents do."""
    ends = {one.span[1] for one in prompt.located_pieces if one.span is not None}
    return prompt.ids[-1] in prompt.tokenizer_facts.eos and bool(
        ends & {prompt.stop, prompt.stop - 1}
    )


def find_reordered(prompt: PromptTokens) -> list[LocatedPiece]:
    """Return the texts that lie in one place each, as they were fed; empty if as declared."""
    told = [
        one
        for one in prompt.located_pieces
        if one.piece.text and one.n_places == 1 and not one.overlaps
    ]
    placed = [(one.span, one) for one in told if one.span is not None]
    found = [one for _, one in sorted(placed, key=lambda pair: pair[0])]
    return [] if found == [one for _, one in placed] else found


def is_order_declared(prompt: PromptTokens) -> bool:
    """Say whether names leave no doubt that an order was meant: none were given, or numbers."""
    labels = [one.label for one in prompt.pieces if one.text]
    texts = [one.text[: len(one.label) - 1] for one in prompt.pieces if one.text]
    are_texts = all(label.startswith(text) for label, text in zip(labels, texts, strict=True))
    numbers = [re.search(r"\d+$", label) for label in labels]
    order = [int(number[0]) for number in numbers if number is not None]
    return are_texts or (len(order) == len(labels) and order == sorted(order))


def lacks_bos(prompt: PromptTokens) -> bool:
    """Say whether the tokenizer begins every text with a BOS and this prompt has none there."""
    is_all = prompt.start == 0 and len(prompt.ids) > prompt.n_pads
    return is_all and prompt.tokenizer_facts.adds_bos is True and not prompt.has_bos


def find_inner_padding(prompt: PromptTokens) -> Iterator[tuple[LocatedPiece, list[int]]]:
    """Yield pieces that hold padding, and where: as the padding mask says, or by its id."""
    for one in prompt.located_pieces:
        if one.span is None or one.piece.label.lower().startswith("padding"):
            continue
        inside = range(max(one.span[0], prompt.start), min(one.span[1], prompt.stop))
        pads = [
            p
            for p in inside
            if p < prompt.first_unpadded or prompt.ids[p - prompt.start] == prompt.pad_id
        ]
        if pads:
            yield one, pads


@dataclass(frozen=True, slots=True)
class TruncatedPiece:
    """A piece of which the prompt holds one end alone: `n_lost` of `n` tokens or characters."""

    piece: DeclaredSegment
    n_lost: int
    n: int
    unit: str
    at_end: bool = True


def find_truncated(prompt: PromptTokens) -> TruncatedPiece | None:
    """Return the first piece that the prompt's end, or its beginning, cuts off."""
    for one in prompt.located_pieces:
        if one.piece.text is None and one.piece.stop > prompt.stop:
            lost = one.piece.stop - max(prompt.stop, one.piece.start)
            return TruncatedPiece(one.piece, lost, one.piece.stop - one.piece.start, "position")
        if one.span is None:
            cut = (
                _find_cut_text(prompt, one.piece)
                if prompt.has_text
                else _find_cut_ids(prompt, one.piece)
            )
            if cut is not None:
                return cut
    return None


def are_character_spans(prompt: PromptTokens) -> bool:
    """Say whether the declared spans would be words or lines as positions in the prompt's text."""
    whole = "".join(prompt.texts).strip(SPECIAL_MARK)
    ends = [edge for span in prompt.spans for edge in (span.start, span.stop)]
    if not prompt.has_text or len(ends) < 4 or ends[-1] > len(whole) + 1:
        return False
    return all(edge in (0, len(whole)) or not whole[edge - 1 : edge + 1].isalnum() for edge in ends)


def _find_cut_text(prompt: PromptTokens, piece: DeclaredSegment) -> TruncatedPiece | None:
    text, whole = piece.text or "", "".join(prompt.texts).strip(SPECIAL_MARK)
    for kept in range(len(text) - 1, _MIN_CUT_CHARACTERS - 1, -1):
        if whole.endswith(text[:kept]):
            return TruncatedPiece(piece, len(text) - kept, len(text), "character")
        if whole.startswith(text[-kept:]):
            return TruncatedPiece(piece, len(text) - kept, len(text), "character", at_end=False)
    return None


def _find_cut_ids(prompt: PromptTokens, piece: DeclaredSegment) -> TruncatedPiece | None:
    ids, whole = list(piece.ids), prompt.ids[prompt.n_pads :]
    for kept in range(len(ids) - 1, 2, -1):
        if whole[-kept:] == ids[:kept]:
            return TruncatedPiece(piece, len(ids) - kept, len(ids), "token")
        if whole[:kept] == ids[-kept:]:
            return TruncatedPiece(piece, len(ids) - kept, len(ids), "token", at_end=False)
    return None


def find_missing_texts(prompt: PromptTokens) -> list[DeclaredSegment]:
    """Return the texts that are not in the prompt, as far as they could be looked for."""
    return [
        one.piece
        for one in prompt.located_pieces
        if one.span is None and (prompt.has_text or one.piece.ids) and prompt.ids
    ]


def is_complete(prompt: PromptTokens) -> bool:
    """Say whether every piece is in the prompt, so that nothing more has to be waited for."""
    return all(one.span is not None and one.span[1] <= prompt.stop for one in prompt.located_pieces)


def find_ambiguous(prompt: PromptTokens) -> Iterator[LocatedPiece]:
    """Yield texts that lie in more places than there are pieces with that text."""
    for one in prompt.located_pieces:
        same = sum(piece.text == one.piece.text for piece in prompt.pieces)
        if one.piece.text is not None and one.n_places > same:
            yield one


def find_uncovered_gaps(prompt: PromptTokens) -> list[Span]:
    """Return the gaps between pieces that hold words."""
    if not prompt.has_text:
        return []
    spans = sorted(one.span for one in prompt.located_pieces if one.span is not None)
    gaps = [(a[1], b[0]) for a, b in pairwise(spans) if a[1] < b[0]]
    return [gap for gap in gaps if any(map(str.isalnum, span_text(prompt, gap)))]


def span_text(prompt: PromptTokens, span: Span) -> str:
    """Return the words between two positions."""
    held = prompt.texts[max(span[0] - prompt.start, 0) : max(span[1] - prompt.start, 0)]
    return "".join(held).replace(SPECIAL_MARK, "")


def token_lengths(prompt: PromptTokens) -> tuple[tuple[int, int], ...]:
    """Return for each text that was found how many tokens it has alone and in the prompt."""
    return tuple(
        (len(one.piece.ids), one.span[1] - one.span[0])
        for one in prompt.located_pieces
        if one.span is not None and one.piece.text is not None and one.piece.ids
    )
