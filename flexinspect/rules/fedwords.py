"""Facts about the words of a prompt: special tokens, padding, and texts that are not all there."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flexinspect.pieces import Piece, Span
from flexinspect.rules.fedfacts import SPECIAL, Fed, Located

_FOREIGN = re.compile(r"<\|\w[\w ]{0,40}\|>|</?s>|<(?:bos|eos|pad|(?:start|end)_of_turn)>")
"""What special tokens of well-known vocabularies look like."""
_HTML = re.compile(r"</?(?:a|p|b|i|br|div|span|li|ul|td|tr|html|body)\b[^>]*>")
_FEW_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Written:
    """Characters of a special token that ordinary tokens make up; `token_id` if there is one."""

    characters: str
    span: Span
    token_id: int | None


def written_specials(fed: Fed) -> Iterator[Written]:
    """Yield the special tokens that the prompt has as characters, in order."""
    if not fed.has_text:
        return
    texts = fed.texts
    whole = "".join(texts)
    own = "|".join(re.escape(name) for name in sorted(fed.words.special, key=len, reverse=True))
    pattern = re.compile(f"{own}|{_FOREIGN.pattern}") if own else _FOREIGN
    is_html = _HTML.search(whole) is not None
    starts = [0, *accumulate(map(len, texts))][:-1]
    for match in pattern.finditer(whole):
        first, last = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end()) - 1
        if first == last or (is_html and match[0] in ("<s>", "</s>")):
            continue
        span = fed.start + first, fed.start + last + 1
        yield Written(match[0], span, fed.words.special.get(match[0]))


def n_leading_bos(fed: Fed) -> int:
    """Return how many BOS come first, after the padding; 1 when they may be padding."""
    ids, bos = fed.ids[fed.n_pads :], fed.words.bos
    n = next((n for n, id_ in enumerate(ids) if id_ != bos), len(ids))
    if bos is None or (n > 2 and bos in (fed.words.pad, *fed.words.eos)) or n == len(ids):
        return min(n, 1)
    return n


def later_bos(fed: Fed) -> list[int]:
    """Return the positions of each BOS inside of the prompt, but for those after an EOS."""
    words, ids = fed.words, fed.ids
    if words.bos is None or words.bos in (words.pad, *words.eos):
        return []
    first = fed.n_pads + n_leading_bos(fed)
    return [
        fed.start + index
        for index, id_ in enumerate(ids)
        if id_ == words.bos and index > first and ids[index - 1] not in words.eos
    ]


def inner_eos(fed: Fed) -> list[int]:
    """Return where an EOS that the tokenizer adds ends a piece, or a text where none is declared.

    Only between words: at the ends of a prompt it may be padding.
    """
    words, eos = fed.words, frozenset(fed.words.eos)
    if not words.adds_eos or words.bos in eos:
        return []
    real = [index for index, id_ in enumerate(fed.ids) if id_ not in (*eos, fed.pad)]
    inside = [fed.start + n for n in range(*(real[:1] + real[-1:])) if fed.ids[n] in eos]
    spans = [one.span for one in fed.located if one.span is not None]
    ends = {stop - back for _, stop in spans for back in (0, 1)}
    return [at for at in inside if at in ends or not fed.pieces]


def are_packed(fed: Fed) -> bool:
    """Say whether the prompt ends with an EOS behind a declared piece, as packed documents do."""
    ends = {one.span[1] for one in fed.located if one.span is not None}
    return fed.ids[-1] in fed.words.eos and bool(ends & {fed.stop, fed.stop - 1})


def reordered(fed: Fed) -> list[Located]:
    """Return the texts that lie in one place each, as they were fed; empty if as declared."""
    told = [one for one in fed.located if one.piece.text and one.n_places == 1 and not one.shares]
    placed = [(one.span, one) for one in told if one.span is not None]
    found = [one for _, one in sorted(placed, key=lambda pair: pair[0])]
    return [] if found == [one for _, one in placed] else found


def is_order_said(fed: Fed) -> bool:
    """Say whether names leave no doubt that an order was meant: none were given, or numbers."""
    labels = [one.label for one in fed.pieces if one.text]
    texts = [one.text[: len(one.label) - 1] for one in fed.pieces if one.text]
    are_texts = all(label.startswith(text) for label, text in zip(labels, texts, strict=True))
    numbers = [re.search(r"\d+$", label) for label in labels]
    order = [int(number[0]) for number in numbers if number is not None]
    return are_texts or (len(order) == len(labels) and order == sorted(order))


def misses_bos(fed: Fed) -> bool:
    """Say whether the tokenizer begins every text with a BOS and this prompt has none there."""
    is_all = fed.start == 0 and len(fed.ids) > fed.n_pads
    return is_all and fed.words.adds_bos is True and not fed.has_bos


def padding_inside(fed: Fed) -> Iterator[tuple[Located, list[int]]]:
    """Yield pieces that hold padding, and where: as the padding mask says, or by its id."""
    for one in fed.located:
        if one.span is None or one.piece.label.lower().startswith("padding"):
            continue
        inside = range(max(one.span[0], fed.start), min(one.span[1], fed.stop))
        pads = [p for p in inside if p < fed.first or fed.ids[p - fed.start] == fed.pad]
        if pads:
            yield one, pads


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of which the prompt holds one end alone: `n_lost` of `n` tokens or characters."""

    piece: Piece
    n_lost: int
    n: int
    unit: str
    at_end: bool = True


def truncated(fed: Fed) -> Cut | None:
    """Return the first piece that the prompt's end, or its beginning, cuts off."""
    for one in fed.located:
        if one.piece.text is None and one.piece.stop > fed.stop:
            lost = one.piece.stop - max(fed.stop, one.piece.start)
            return Cut(one.piece, lost, one.piece.stop - one.piece.start, "position")
        if one.span is None:
            cut = _cut_text(fed, one.piece) if fed.has_text else _cut_ids(fed, one.piece)
            if cut is not None:
                return cut
    return None


def counts_characters(fed: Fed) -> bool:
    """Say whether the declared spans would be words or lines as positions in the prompt's text."""
    whole = "".join(fed.texts).strip(SPECIAL)
    ends = [edge for span in fed.spans for edge in (span.start, span.stop)]
    if not fed.has_text or len(ends) < 4 or ends[-1] > len(whole) + 1:
        return False
    return all(edge in (0, len(whole)) or not whole[edge - 1 : edge + 1].isalnum() for edge in ends)


def _cut_text(fed: Fed, piece: Piece) -> Cut | None:
    text, whole = piece.text or "", "".join(fed.texts).strip(SPECIAL)
    for kept in range(len(text) - 1, _FEW_CHARACTERS - 1, -1):
        if whole.endswith(text[:kept]):
            return Cut(piece, len(text) - kept, len(text), "character")
        if whole.startswith(text[-kept:]):
            return Cut(piece, len(text) - kept, len(text), "character", at_end=False)
    return None


def _cut_ids(fed: Fed, piece: Piece) -> Cut | None:
    ids, whole = list(piece.ids), fed.ids[fed.n_pads :]
    for kept in range(len(ids) - 1, 2, -1):
        if whole[-kept:] == ids[:kept]:
            return Cut(piece, len(ids) - kept, len(ids), "token")
        if whole[:kept] == ids[-kept:]:
            return Cut(piece, len(ids) - kept, len(ids), "token", at_end=False)
    return None


def not_found(fed: Fed) -> list[Piece]:
    """Return the texts that are not in the prompt, as far as they could be looked for."""
    return [
        one.piece
        for one in fed.located
        if one.span is None and (fed.has_text or one.piece.ids) and fed.ids
    ]


def is_complete(fed: Fed) -> bool:
    """Say whether every piece is in the prompt, so that nothing more has to be waited for."""
    return all(one.span is not None and one.span[1] <= fed.stop for one in fed.located)


def ambiguous(fed: Fed) -> Iterator[Located]:
    """Yield texts that lie in more places than there are pieces with that text."""
    for one in fed.located:
        same = sum(piece.text == one.piece.text for piece in fed.pieces)
        if one.piece.text is not None and one.n_places > same:
            yield one


def words_between(fed: Fed) -> list[Span]:
    """Return the gaps between pieces that hold words."""
    if not fed.has_text:
        return []
    spans = sorted(one.span for one in fed.located if one.span is not None)
    gaps = [(a[1], b[0]) for a, b in pairwise(spans) if a[1] < b[0]]
    return [gap for gap in gaps if any(map(str.isalnum, text_of(fed, gap)))]


def text_of(fed: Fed, span: Span) -> str:
    """Return the words between two positions."""
    held = fed.texts[max(span[0] - fed.start, 0) : max(span[1] - fed.start, 0)]
    return "".join(held).replace(SPECIAL, "")


def lengths(fed: Fed) -> tuple[tuple[int, int], ...]:
    """Return for each text that was found how many tokens it has alone and in the prompt."""
    return tuple(
        (len(one.piece.ids), one.span[1] - one.span[0])
        for one in fed.located
        if one.span is not None and one.piece.text is not None and one.piece.ids
    )
