"""What was fed and what was declared of it, as the rules of the family `segments` look at them.

Nothing but the spans was declared, so each way needs spans that do not fit where they are and all
fit when moved: to where lines begin and end, to where the same tokens lie between them, or past a
BOS in the first to the end of the prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise

from flexinspect.records.prompt import (
    DeclaredSegment,
    Segment,
    SegmentKind,
    Span,
    TokenizerFacts,
    declared_segments,
    declared_tokenizer,
    find_id_spans,
    find_text_spans,
)
from flexinspect.records.step import TokenRecord
from flexinspect.rules.context import RuleContext

_SENTENCE_ENDS = ".?!:。？！："
_MAX_PLACES = 9

SPECIAL_MARK = "\0"
"""What stands for a special token where texts are looked for."""


@dataclass(frozen=True, slots=True)
class LocatedPiece:
    """A declared piece and where it is: `span` is None for a text that was not found.

    `shares` says that an earlier piece has some of its tokens; `n_places` in how many places its
    text was found, counted up to nine.
    """

    piece: DeclaredSegment
    span: Span | None
    overlaps: bool = False
    n_places: int = 1


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as it was fed: its tokens, from position `start` on, and the pieces declared."""

    tokens: tuple[TokenRecord, ...]
    segments: tuple[Segment, ...]
    pieces: tuple[DeclaredSegment, ...]
    tokenizer_facts: TokenizerFacts

    @classmethod
    def from_context(
        cls, context: RuleContext, later_tokens: Sequence[TokenRecord] = ()
    ) -> PromptTokens:
        """Return the prompt of a generation, with the tokens that later forwards were given."""
        declared = context.generation.declared
        tokens = (*context.generation.tokens, *later_tokens)
        return cls(
            tokens, context.segments, declared_segments(declared), declared_tokenizer(declared)
        )

    @property
    def start(self) -> int:
        """The first position that was fed."""
        return self.tokens[0].pos if self.tokens else 0

    @property
    def stop(self) -> int:
        """The position after the last one that was fed."""
        return self.tokens[-1].pos + 1 if self.tokens else 0

    @cached_property
    def ids(self) -> list[int]:
        """The ids fed."""
        return [token.token_id for token in self.tokens]

    @cached_property
    def texts(self) -> list[str]:
        """What each token adds to the text; a special one is no text that could be declared."""
        return [SPECIAL_MARK if token.special else token.text for token in self.tokens]

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer was at hand, so that tokens have words."""
        return self.tokenizer_facts.adds_bos is not None

    @cached_property
    def n_pads(self) -> int:
        """How many of the first tokens are padding, as the padding mask or their id says."""
        first = [one for one in self.segments[:2] if one.label == "padding"]
        if first and first[0].kind is SegmentKind.SHARED:
            return len(first[0])
        pad = self.pad_id
        return next((n for n, id_ in enumerate(self.ids) if id_ != pad), 0) if self.ids else 0

    @property
    def pad_id(self) -> int | None:
        """The id of padding, None when it may be a BOS or EOS too."""
        pad = self.tokenizer_facts.pad
        return None if pad in (self.tokenizer_facts.bos, *self.tokenizer_facts.eos) else pad

    @cached_property
    def first_unpadded(self) -> int:
        """The first position that is no padding."""
        return self.start + self.n_pads

    @cached_property
    def has_bos(self) -> bool:
        """Whether a BOS comes first, after the padding."""
        begin = self.ids[self.n_pads : self.n_pads + 1]
        return self.tokenizer_facts.bos is not None and begin == [self.tokenizer_facts.bos]

    @cached_property
    def spans(self) -> tuple[DeclaredSegment, ...]:
        """The pieces that were declared as spans, by position."""
        spans = [piece for piece in self.pieces if piece.text is None]
        return tuple(sorted(spans, key=lambda piece: piece.start))

    @cached_property
    def paraphrases(self) -> tuple[Segment, ...]:
        """The segments that are kept apart from each other, by position."""
        return tuple(one for one in self.segments if one.kind is SegmentKind.PARAPHRASE)

    @cached_property
    def located_pieces(self) -> tuple[LocatedPiece, ...]:
        """All pieces with their places, in the order they were declared.

        A text is looked for after the piece before it, then from the beginning.
        """
        return tuple(self._locate())

    def _locate(self) -> Iterator[LocatedPiece]:
        taken: list[Span] = []
        after = self.n_pads
        for piece in self.pieces:
            if piece.text is None:
                span: Span | None = (piece.start, piece.stop)
                n_places = 1
            else:
                found = [*self._find_place(piece, after), *self._find_place(piece, self.n_pads)]
                span = found[0] if found else None
                n_places = self._count_places(piece)
            if span is None:
                yield LocatedPiece(piece, None, n_places=0)
                continue
            shares = any(span[0] < stop and start < span[1] for start, stop in taken)
            yield LocatedPiece(piece, span, shares, n_places)
            taken.append(span)
            after = span[1] - self.start

    def _find_place(self, piece: DeclaredSegment, after: int) -> Iterator[Span]:
        """Yield the first place of a text, in positions: by its ids, else by its characters."""
        for places in self._iter_searches(piece, after):
            for start, stop in islice(places, 1):
                yield self.start + start, self.start + stop
                return

    def _count_places(self, piece: DeclaredSegment) -> int:
        """Return in how many places a text is, up to nine."""
        ways = self._iter_searches(piece, self.n_pads)
        return max(sum(1 for _ in islice(places, _MAX_PLACES)) for places in ways)

    def _iter_searches(self, piece: DeclaredSegment, after: int) -> Iterator[Iterator[Span]]:
        yield find_id_spans(piece.ids, self.ids, after)
        if self.has_text:
            yield find_text_spans(piece.text or "", self.texts, after)

    @cached_property
    def line_edges(self) -> tuple[frozenset[int], frozenset[int]]:
        """Positions at which a line or sentence begins, and those before which one ends."""
        begins: set[int] = set()
        ends = {self.stop}
        before = "\n"
        for token in self.tokens:
            text, last = token.text, before.rstrip()[-1:]
            is_apart = before != before.rstrip() or text[:1].isspace()
            is_new = before.endswith("\n") or (last != "" and last in _SENTENCE_ENDS and is_apart)
            if token.special or is_new or text.startswith("\n"):
                ends.add(token.pos)
            if is_new and not token.special and text.strip("\r\n"):
                begins.add(token.pos)
            before = "\n" if token.special else (before + text)[-8:]
        return frozenset(begins), frozenset(ends)


MAX_SHIFT = 32
"""How many tokens a span is moved at most, but by the padding, which may be any."""
_MAX_SPAN_SHIFT = 8
_MAX_BORDER_SHIFT = 4


@dataclass(frozen=True, slots=True)
class SpanShift:
    """By how many tokens each span must be moved to fit (0: it does), and what says so.

    `by` is "lines" (where lines and sentences begin and end), "gaps" (the tokens between spans) or
    "ends" (a BOS inside of the first span, the end of the prompt behind the last).
    """

    offsets: tuple[int, ...]
    source: str

    @property
    def tokens(self) -> int | None:
        """The number of tokens if all spans are off by the same."""
        return self.offsets[0] if len(set(self.offsets)) == 1 else None


def find_shift(prompt: PromptTokens) -> SpanShift | None:
    """Return how the declared spans are off, None when they fit or nothing tells."""
    spans = prompt.spans
    if not spans or not prompt.tokens:
        return None
    if prompt.has_text and _spans_fit(prompt, spans, 0):
        return None
    n = _shift_by_lines(prompt, spans) if prompt.has_text else None
    if n is not None:
        return SpanShift((n,) * len(spans), "lines")
    drift = _span_shifts_by_lines(prompt, spans) if prompt.has_text else None
    if drift is not None:
        return SpanShift(drift, "lines")
    for by, n in (("gaps", _shift_by_gaps(prompt, spans)), ("ends", _shift_by_ends(prompt, spans))):
        if n is not None:
            return SpanShift((n,) * len(spans), by) if n else None
    return None


def candidate_shifts(prompt: PromptTokens) -> list[int]:
    """Return the numbers of tokens to try, the smallest first: a few, and the padding's."""
    near = {*range(-MAX_SHIFT, MAX_SHIFT + 1), *leading_lengths(prompt)} - {0}
    return sorted(near, key=lambda n: (abs(n), n < 0))


def leading_lengths(prompt: PromptTokens) -> set[int]:
    """Return how many tokens come before the first word: the BOS, the padding, both."""
    bos = int(prompt.has_bos)
    return {bos, prompt.n_pads, prompt.n_pads + bos} - {0}


def _shift_by_lines(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    begins, ends = prompt.line_edges
    # The first may begin with whatever comes first in the prompt, which tells nothing.
    n_begin = sum(span.start in begins for span in spans[1:])
    n_end = sum(span.stop in ends for span in spans)
    if n_begin > len(spans) // 4 or n_begin + n_end > len(spans):
        return None
    likely = leading_lengths(prompt) if len(spans) == 1 else candidate_shifts(prompt)
    return next((n for n in likely if _spans_fit(prompt, spans, n)), None)


def _span_shifts_by_lines(
    prompt: PromptTokens, spans: Sequence[DeclaredSegment]
) -> tuple[int, ...] | None:
    """Return offsets that grow from span to span, None unless each span has one."""
    offsets = []
    for span in spans:
        near = sorted(range(-_MAX_SPAN_SHIFT, _MAX_SPAN_SHIFT + 1), key=abs)
        fit = next((n for n in near if _spans_fit(prompt, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(spans) < 3 and max(map(abs, offsets)) > 2:
        return None
    return tuple(offsets) if is_growing(offsets) else None


def is_growing(offsets: Sequence[int]) -> bool:
    """Say whether offsets go further and further one way, and are not all the same."""
    far = [abs(offset) for offset in offsets]
    is_one_way = min(offsets) >= 0 or max(offsets) <= 0
    return is_one_way and far == sorted(far) and far[0] != far[-1]


def _spans_fit(prompt: PromptTokens, spans: Sequence[DeclaredSegment], n: int) -> bool:
    begins, ends = prompt.line_edges
    return all(span.start + n in begins and span.stop + n in ends for span in spans)


def _shift_by_gaps(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """Return the move after which the same ids lie between all spans; 0 when they do already."""
    gaps = [(a.stop, b.start) for a, b in pairwise(spans)]
    width = min((b - a for a, b in gaps), default=0)
    if len(gaps) < 2 or width < 1:
        return None
    if _gaps_are_equal(prompt, gaps, 0):
        return 0
    is_sure = len(gaps) > 2 or width > 1
    likely = candidate_shifts(prompt) if is_sure else sorted(leading_lengths(prompt))
    return next((n for n in likely if _gaps_are_equal(prompt, gaps, n)), None)


def _gaps_are_equal(prompt: PromptTokens, gaps: Sequence[Span], n: int) -> bool:
    offset = n - prompt.start
    if gaps[0][0] + offset < 0 or gaps[-1][1] + n > prompt.stop:
        return False
    if prompt.has_text and any(
        map(str.isalnum, "".join(prompt.texts[slice(*_move_gap(gaps[0], offset))]))
    ):
        return False  # paraphrases have words in common
    return len({tuple(prompt.ids[slice(*_move_gap(gap, offset))]) for gap in gaps}) == 1


def _move_gap(gap: Span, n: int) -> Span:
    return gap[0] + n, gap[1] + n


def _shift_by_ends(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """Return the move that takes a BOS out of the first span and the last one to the end."""
    first, last = spans[0], spans[-1]
    n = prompt.stop - last.stop
    if prompt.tokenizer_facts.bos is None or not _is_paraphrase(prompt, first):
        return None
    if n > 0 and prompt.has_bos and n == prompt.first_unpadded + 1 - first.start:
        return n
    if n == -1 and not prompt.has_bos and first.start == prompt.first_unpadded + 1:
        return n
    return None


def _is_paraphrase(prompt: PromptTokens, piece: DeclaredSegment) -> bool:
    return any(one.label == piece.label for one in prompt.paraphrases)


def find_odd_border(prompt: PromptTokens) -> Iterator[tuple[DeclaredSegment, bool, int]]:
    """Yield the one border that does not fit, as (span, whether its start, how far to move it).

    Only among at least two spans whose other borders are all where lines or sentences are.
    """
    begins, ends = prompt.line_edges
    odd = [(span, True) for span in prompt.spans if span.start not in begins]
    odd += [(span, False) for span in prompt.spans if span.stop not in ends]
    if not prompt.has_text or len(prompt.spans) < 2 or len(odd) != 1:
        return
    span, is_start = odd[0]
    at, fitting = (span.start, begins) if is_start else (span.stop, ends)
    near = sorted(range(-_MAX_BORDER_SHIFT, _MAX_BORDER_SHIFT + 1), key=abs)
    n = next((n for n in near if at + n in fitting), None)
    if n is not None and span.start + n * is_start < span.stop + n * (not is_start):
        yield span, is_start, n


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
