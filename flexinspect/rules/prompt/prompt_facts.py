"""Facts about a prompt for the rules of the family `segments`: tokens, located pieces, misfits.

`PromptTokens` locates the declared pieces in the input ids. `find_shift` and `find_odd_border` look
for declared spans that are off. Nothing but the spans was declared, so a shift is only reported if
no span fits where it is and all fit when shifted: to line boundaries, to positions with the same
tokens between the spans, or past a BOS inside the first span up to the end of the prompt.
The remaining functions find missing, truncated, ambiguous, padded and reordered pieces, and special
tokens where none should be.
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

MAX_COUNTED_PLACES = 9
"""Occurrences of a text are counted up to this number."""

MAX_SHIFT = 32
"""Tokens by which spans are shifted at most, except by the padding, which may be any length."""
_MAX_SPAN_SHIFT = 8
_MAX_BORDER_SHIFT = 4

SPECIAL_MARK = "\0"
"""Replaces a special token in the text that is searched."""

_SENTENCE_ENDS = ".?!:。？！："
_KNOWN_SPECIALS = re.compile(r"<\|\w[\w ]{0,40}\|>|</?s>|<(?:bos|eos|pad|(?:start|end)_of_turn)>")
"""Special tokens of well-known vocabularies."""
_HTML_TAG = re.compile(r"</?(?:a|p|b|i|br|div|span|li|ul|td|tr|html|body)\b[^>]*>")
_MIN_CUT_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class LocatedPiece:
    """A declared piece and its span in the prompt, None for a text that was not found.

    `overlaps` says that it shares tokens with an earlier piece. `n_places` is how often its text
    occurs, counted up to `MAX_COUNTED_PLACES`.
    """

    piece: DeclaredSegment
    span: Span | None
    overlaps: bool = False
    n_places: int = 1


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, from position `start` on, and the declared pieces."""

    tokens: tuple[TokenRecord, ...]
    segments: tuple[Segment, ...]
    pieces: tuple[DeclaredSegment, ...]
    tokenizer_facts: TokenizerFacts

    @classmethod
    def from_context(
        cls, context: RuleContext, later_tokens: Sequence[TokenRecord] = ()
    ) -> PromptTokens:
        """The prompt of a generation; `later_tokens` are those of later chunks of a prefill."""
        declared = context.generation.declared
        tokens = (*context.generation.tokens, *later_tokens)
        return cls(
            tokens, context.segments, declared_segments(declared), declared_tokenizer(declared)
        )

    @property
    def start(self) -> int:
        """The first input position."""
        return self.tokens[0].pos if self.tokens else 0

    @property
    def stop(self) -> int:
        """The position after the last input token."""
        return self.tokens[-1].pos + 1 if self.tokens else 0

    @cached_property
    def ids(self) -> list[int]:
        """The input ids."""
        return [token.token_id for token in self.tokens]

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token; special tokens are `SPECIAL_MARK`, which no declared text has."""
        return [SPECIAL_MARK if token.special else token.text for token in self.tokens]

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer was available, so that tokens have texts."""
        return self.tokenizer_facts.adds_bos is not None

    @cached_property
    def n_pads(self) -> int:
        """Number of leading padding tokens, from the padding mask or else from their id."""
        padding = [segment for segment in self.segments[:2] if segment.label == "padding"]
        if padding and padding[0].kind is SegmentKind.SHARED:
            return len(padding[0])
        pad = self.pad_id
        return next((n for n, id_ in enumerate(self.ids) if id_ != pad), 0) if self.ids else 0

    @property
    def pad_id(self) -> int | None:
        """The padding id, None if it is also the BOS or an EOS."""
        pad = self.tokenizer_facts.pad
        return None if pad in (self.tokenizer_facts.bos, *self.tokenizer_facts.eos) else pad

    @cached_property
    def first_unpadded(self) -> int:
        """The first position that is not padding."""
        return self.start + self.n_pads

    @cached_property
    def has_bos(self) -> bool:
        """Whether the first token after the padding is a BOS."""
        first = self.ids[self.n_pads : self.n_pads + 1]
        return self.tokenizer_facts.bos is not None and first == [self.tokenizer_facts.bos]

    @cached_property
    def spans(self) -> tuple[DeclaredSegment, ...]:
        """The pieces declared as spans, by position."""
        spans = [piece for piece in self.pieces if piece.text is None]
        return tuple(sorted(spans, key=lambda piece: piece.start))

    @cached_property
    def paraphrases(self) -> tuple[Segment, ...]:
        """The segments that should be isolated from each other, by position."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.PARAPHRASE)

    @cached_property
    def located_pieces(self) -> tuple[LocatedPiece, ...]:
        """All pieces with their spans, in declared order.

        A text is searched after the previous piece first, then from the beginning.
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
                places = [*self._find_place(piece, after), *self._find_place(piece, self.n_pads)]
                span = places[0] if places else None
                n_places = self._count_places(piece)
            if span is None:
                yield LocatedPiece(piece, None, n_places=0)
                continue
            overlaps = any(span[0] < stop and start < span[1] for start, stop in taken)
            yield LocatedPiece(piece, span, overlaps, n_places)
            taken.append(span)
            after = span[1] - self.start

    def _find_place(self, piece: DeclaredSegment, after: int) -> Iterator[Span]:
        """Yield the first span of a text, in positions: by its ids, else by its characters."""
        for places in self._iter_searches(piece, after):
            for start, stop in islice(places, 1):
                yield self.start + start, self.start + stop
                return

    def _count_places(self, piece: DeclaredSegment) -> int:
        """How often a text occurs, up to `MAX_COUNTED_PLACES`."""
        searches = self._iter_searches(piece, self.n_pads)
        return max(sum(1 for _ in islice(places, MAX_COUNTED_PLACES)) for places in searches)

    def _iter_searches(self, piece: DeclaredSegment, after: int) -> Iterator[Iterator[Span]]:
        yield find_id_spans(piece.ids, self.ids, after)
        if self.has_text:
            yield find_text_spans(piece.text or "", self.texts, after)

    @cached_property
    def line_edges(self) -> tuple[frozenset[int], frozenset[int]]:
        """Positions at which lines or sentences begin, and positions before which they end."""
        begins: set[int] = set()
        ends = {self.stop}
        before = "\n"
        for token in self.tokens:
            text, last = token.text, before.rstrip()[-1:]
            is_separate = before != before.rstrip() or text[:1].isspace()
            ends_sentence = last != "" and last in _SENTENCE_ENDS and is_separate
            is_new = before.endswith("\n") or ends_sentence
            if token.special or is_new or text.startswith("\n"):
                ends.add(token.pos)
            if is_new and not token.special and text.strip("\r\n"):
                begins.add(token.pos)
            before = "\n" if token.special else (before + text)[-8:]
        return frozenset(begins), frozenset(ends)


@dataclass(frozen=True, slots=True)
class SpanShift:
    """By how many tokens each span must be shifted to fit (0: it fits), and the reason.

    `source` is "lines" (line and sentence boundaries), "gaps" (the tokens between the spans) or
    "ends" (a BOS inside the first span and the end of the prompt after the last).
    """

    offsets: tuple[int, ...]
    source: str

    @property
    def tokens(self) -> int | None:
        """The number of tokens if all spans are off by the same number, else None."""
        return self.offsets[0] if len(set(self.offsets)) == 1 else None


def find_shift(prompt: PromptTokens) -> SpanShift | None:
    """How the declared spans are off; None if they fit, or if it is not known."""
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
    shifts = (("gaps", _shift_by_gaps(prompt, spans)), ("ends", _shift_by_ends(prompt, spans)))
    for source, n in shifts:
        if n is not None:
            return SpanShift((n,) * len(spans), source) if n else None
    return None


def candidate_shifts(prompt: PromptTokens) -> list[int]:
    """Shifts to try, the smallest first: up to `MAX_SHIFT`, and by the padding."""
    shifts = {*range(-MAX_SHIFT, MAX_SHIFT + 1), *leading_lengths(prompt)} - {0}
    return sorted(shifts, key=lambda n: (abs(n), n < 0))


def leading_lengths(prompt: PromptTokens) -> set[int]:
    """Numbers of tokens that can precede the first word: the BOS, the padding, or both."""
    bos = int(prompt.has_bos)
    return {bos, prompt.n_pads, prompt.n_pads + bos} - {0}


def _shift_by_lines(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    begins, ends = prompt.line_edges
    # The first span may begin with the prompt itself, which proves nothing.
    n_begin = sum(span.start in begins for span in spans[1:])
    n_end = sum(span.stop in ends for span in spans)
    if n_begin > len(spans) // 4 or n_begin + n_end > len(spans):
        return None
    shifts = leading_lengths(prompt) if len(spans) == 1 else candidate_shifts(prompt)
    return next((n for n in shifts if _spans_fit(prompt, spans, n)), None)


def _span_shifts_by_lines(
    prompt: PromptTokens, spans: Sequence[DeclaredSegment]
) -> tuple[int, ...] | None:
    """Offsets that grow from span to span; None unless each span has one."""
    offsets = []
    shifts = sorted(range(-_MAX_SPAN_SHIFT, _MAX_SPAN_SHIFT + 1), key=abs)
    for span in spans:
        fit = next((n for n in shifts if _spans_fit(prompt, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(spans) < 3 and max(map(abs, offsets)) > 2:
        return None
    return tuple(offsets) if is_growing(offsets) else None


def is_growing(offsets: Sequence[int]) -> bool:
    """Whether offsets grow in one direction and are not all the same."""
    sizes = [abs(offset) for offset in offsets]
    has_one_sign = min(offsets) >= 0 or max(offsets) <= 0
    return has_one_sign and sizes == sorted(sizes) and sizes[0] != sizes[-1]


def _spans_fit(prompt: PromptTokens, spans: Sequence[DeclaredSegment], n: int) -> bool:
    begins, ends = prompt.line_edges
    return all(span.start + n in begins and span.stop + n in ends for span in spans)


def _shift_by_gaps(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """The shift after which all gaps between spans hold the same ids; 0 if they already do."""
    gaps = [(a.stop, b.start) for a, b in pairwise(spans)]
    width = min((b - a for a, b in gaps), default=0)
    if len(gaps) < 2 or width < 1:
        return None
    if _gaps_are_equal(prompt, gaps, 0):
        return 0
    is_reliable = len(gaps) > 2 or width > 1
    shifts = candidate_shifts(prompt) if is_reliable else sorted(leading_lengths(prompt))
    return next((n for n in shifts if _gaps_are_equal(prompt, gaps, n)), None)


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
    """The shift that moves a BOS out of the first span and the last span to the end."""
    first, last = spans[0], spans[-1]
    n = prompt.stop - last.stop
    is_paraphrase = any(segment.label == first.label for segment in prompt.paraphrases)
    if prompt.tokenizer_facts.bos is None or not is_paraphrase:
        return None
    if n > 0 and prompt.has_bos and n == prompt.first_unpadded + 1 - first.start:
        return n
    if n == -1 and not prompt.has_bos and first.start == prompt.first_unpadded + 1:
        return n
    return None


def find_odd_border(prompt: PromptTokens) -> Iterator[tuple[DeclaredSegment, bool, int]]:
    """Yield the only border that does not fit, as (span, is its start, shift in tokens).

    Requires at least two spans, with all other borders at line or sentence boundaries.
    """
    begins, ends = prompt.line_edges
    odd = [(span, True) for span in prompt.spans if span.start not in begins]
    odd += [(span, False) for span in prompt.spans if span.stop not in ends]
    if not prompt.has_text or len(prompt.spans) < 2 or len(odd) != 1:
        return
    span, is_start = odd[0]
    at, fitting = (span.start, begins) if is_start else (span.stop, ends)
    shifts = sorted(range(-_MAX_BORDER_SHIFT, _MAX_BORDER_SHIFT + 1), key=abs)
    n = next((n for n in shifts if at + n in fitting), None)
    if n is not None and span.start + n * is_start < span.stop + n * (not is_start):
        yield span, is_start, n


@dataclass(frozen=True, slots=True)
class WrittenSpecial:
    """The characters of a special token as ordinary tokens; `token_id` is its id, if it has one."""

    characters: str
    span: Span
    token_id: int | None


def find_written_specials(prompt: PromptTokens) -> Iterator[WrittenSpecial]:
    """Yield the special tokens that the prompt contains as characters, in order."""
    if not prompt.has_text:
        return
    texts = prompt.texts
    whole = "".join(texts)
    names = sorted(prompt.tokenizer_facts.special, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, names), _KNOWN_SPECIALS.pattern]))
    is_html = _HTML_TAG.search(whole) is not None
    starts = [0, *accumulate(map(len, texts))][:-1]
    for match in pattern.finditer(whole):
        first, last = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end()) - 1
        if first == last or (is_html and match[0] in ("<s>", "</s>")):
            continue
        span = prompt.start + first, prompt.start + last + 1
        yield WrittenSpecial(match[0], span, prompt.tokenizer_facts.special.get(match[0]))


def count_leading_bos(prompt: PromptTokens) -> int:
    """Number of BOS tokens after the padding; at most 1 if they may be padding."""
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
    """Positions of BOS tokens inside the prompt, except those after an EOS."""
    facts, ids = prompt.tokenizer_facts, prompt.ids
    if facts.bos is None or facts.bos in (facts.pad, *facts.eos):
        return []
    first = prompt.n_pads + count_leading_bos(prompt)
    return [
        prompt.start + index
        for index, id_ in enumerate(ids)
        if id_ == facts.bos and index > first and ids[index - 1] not in facts.eos
    ]


def find_inner_eos(prompt: PromptTokens) -> list[int]:
    """Positions of EOS tokens that the tokenizer added at the end of a piece.

    Without declared pieces, all EOS tokens between words count; at the ends of a prompt they may be
    padding.
    """
    facts, eos = prompt.tokenizer_facts, frozenset(prompt.tokenizer_facts.eos)
    if not facts.adds_eos or facts.bos in eos:
        return []
    real = [index for index, id_ in enumerate(prompt.ids) if id_ not in (*eos, prompt.pad_id)]
    inside = [prompt.start + n for n in range(*(real[:1] + real[-1:])) if prompt.ids[n] in eos]
    spans = [located.span for located in prompt.located_pieces if located.span is not None]
    ends = {stop - back for _, stop in spans for back in (0, 1)}
    return [at for at in inside if at in ends or not prompt.pieces]


def is_packed(prompt: PromptTokens) -> bool:
    """Whether the prompt ends with an EOS after a declared piece, as packed documents do."""
    ends = {located.span[1] for located in prompt.located_pieces if located.span is not None}
    return prompt.ids[-1] in prompt.tokenizer_facts.eos and bool(
        ends & {prompt.stop, prompt.stop - 1}
    )


def find_reordered(prompt: PromptTokens) -> list[LocatedPiece]:
    """The unambiguous texts in prompt order; empty if that is the declared order."""
    declared = [
        (located.span, located)
        for located in prompt.located_pieces
        if located.piece.text
        and located.n_places == 1
        and not located.overlaps
        and located.span is not None
    ]
    by_position = sorted(declared, key=lambda pair: pair[0])
    return [] if by_position == declared else [located for _, located in by_position]


def is_order_declared(prompt: PromptTokens) -> bool:
    """Whether the declared order is intended: the pieces have no labels, or ascending numbers."""
    labels = [piece.label for piece in prompt.pieces if piece.text]
    texts = [piece.text[: len(piece.label) - 1] for piece in prompt.pieces if piece.text]
    are_texts = all(label.startswith(text) for label, text in zip(labels, texts, strict=True))
    numbers = [re.search(r"\d+$", label) for label in labels]
    order = [int(number[0]) for number in numbers if number is not None]
    return are_texts or (len(order) == len(labels) and order == sorted(order))


def lacks_bos(prompt: PromptTokens) -> bool:
    """Whether the tokenizer adds a BOS to every text and this prompt does not begin with one."""
    is_whole = prompt.start == 0 and len(prompt.ids) > prompt.n_pads
    return is_whole and prompt.tokenizer_facts.adds_bos is True and not prompt.has_bos


def find_inner_padding(prompt: PromptTokens) -> Iterator[tuple[LocatedPiece, list[int]]]:
    """Yield pieces that contain padding, with its positions (from the padding mask or its id)."""
    for located in prompt.located_pieces:
        if located.span is None or located.piece.label.lower().startswith("padding"):
            continue
        inside = range(max(located.span[0], prompt.start), min(located.span[1], prompt.stop))
        pads = [
            p
            for p in inside
            if p < prompt.first_unpadded or prompt.ids[p - prompt.start] == prompt.pad_id
        ]
        if pads:
            yield located, pads


@dataclass(frozen=True, slots=True)
class TruncatedPiece:
    """A piece of which the prompt holds only one end: `n_lost` of `n` units are missing.

    `unit` is "position", "token" or "character"; `at_end` says that its end is missing.
    """

    piece: DeclaredSegment
    n_lost: int
    n: int
    unit: str
    at_end: bool = True


def find_truncated(prompt: PromptTokens) -> TruncatedPiece | None:
    """The first piece that is cut off at the end or the beginning of the prompt."""
    find_cut = _find_cut_text if prompt.has_text else _find_cut_ids
    for located in prompt.located_pieces:
        piece = located.piece
        if piece.text is None and piece.stop > prompt.stop:
            lost = piece.stop - max(prompt.stop, piece.start)
            return TruncatedPiece(piece, lost, piece.stop - piece.start, "position")
        if located.span is None:
            cut = find_cut(prompt, piece)
            if cut is not None:
                return cut
    return None


def are_character_spans(prompt: PromptTokens) -> bool:
    """Whether the declared spans fit the words of the prompt when read as character positions."""
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
    """The declared texts that are not in the prompt, as far as they could be searched."""
    return [
        located.piece
        for located in prompt.located_pieces
        if located.span is None and (prompt.has_text or located.piece.ids) and prompt.ids
    ]


def is_complete(prompt: PromptTokens) -> bool:
    """Whether every declared piece is in the prompt."""
    spans = [located.span for located in prompt.located_pieces]
    return all(span is not None and span[1] <= prompt.stop for span in spans)


def find_ambiguous(prompt: PromptTokens) -> Iterator[LocatedPiece]:
    """Yield texts that occur more often than pieces with that text were declared."""
    for located in prompt.located_pieces:
        n_declared = sum(piece.text == located.piece.text for piece in prompt.pieces)
        if located.piece.text is not None and located.n_places > n_declared:
            yield located


def find_uncovered_gaps(prompt: PromptTokens) -> list[Span]:
    """The gaps between pieces that contain words."""
    if not prompt.has_text:
        return []
    spans = sorted(located.span for located in prompt.located_pieces if located.span is not None)
    gaps = [(a[1], b[0]) for a, b in pairwise(spans) if a[1] < b[0]]
    return [gap for gap in gaps if any(map(str.isalnum, span_text(prompt, gap)))]


def span_text(prompt: PromptTokens, span: Span) -> str:
    """The text between two positions, without special tokens."""
    texts = prompt.texts[max(span[0] - prompt.start, 0) : max(span[1] - prompt.start, 0)]
    return "".join(texts).replace(SPECIAL_MARK, "")


def token_lengths(prompt: PromptTokens) -> tuple[tuple[int, int], ...]:
    """For each text that was found, its number of tokens when encoded alone and in the prompt."""
    return tuple(
        (len(located.piece.ids), located.span[1] - located.span[0])
        for located in prompt.located_pieces
        if located.span is not None and located.piece.text is not None and located.piece.ids
    )
