"""The tokens of a prompt with its declared pieces, and by how much declared spans are off.

`PromptTokens` locates the declared pieces in the input ids. `find_shift` looks for declared spans
that are off. Nothing but the spans was declared, so a shift is only reported if no span fits where
it is and all fit when shifted: to line boundaries, to positions with the same tokens between the
spans, or past a BOS inside the first span up to the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import NamedTuple

from flexinspect.records import prompt as records
from flexinspect.records.prompt import DeclaredSegment, PromptPart, SegmentKind, Span
from flexinspect.records.step import TokenRecord
from flexinspect.rules.context import RuleContext

MAX_COUNTED_PLACES = 9  # occurrences of a text are counted up to this number
MAX_SHIFT = 32  # tokens by which spans are shifted at most, except by the padding (any length)
_MAX_SPAN_SHIFT = 8
SPECIAL_MARK = "\0"  # replaces a special token in the text that is searched
_SENTENCE_ENDS = ".?!:。？！："


class LocatedPiece(NamedTuple):
    """A declared piece and its span in the prompt, None for a text that was not found.

    `overlaps` says that it shares tokens with an earlier piece. `n_places` is how often its text
    occurs, counted up to `MAX_COUNTED_PLACES`.
    """

    piece: DeclaredSegment
    span: Span | None
    overlaps: bool = False
    n_places: int = 1


class PromptTokens:
    """The tokens of a prompt, from position `start` up to `stop`, and the declared pieces.

    `later` are the tokens of later chunks of a prefill. `texts` has a text for each token; those of
    special tokens are `SPECIAL_MARK`, which no declared text has. `has_text` says whether there was
    a tokenizer, `has_bos` whether the first token after `n_pads` padding tokens is a BOS. `pad_id`
    is None if it is also the BOS or an EOS. `spans` are the pieces declared as spans, and
    `paraphrases` the segments that should be isolated from each other, by position. `parts` are the
    lists of ids that the program has of the prompt, without those that another one divides.
    """

    def __init__(self, context: RuleContext, later: Sequence[TokenRecord] = ()) -> None:
        declared = context.generation.declared
        self.tokens = tokens = (*context.generation.tokens, *later)
        self.pieces = records.declared_segments(declared)
        self.parts = _undivided(records.declared_parts(declared))
        self.tokenizer = facts = records.declared_tokenizer(declared)
        self.start, self.stop = (tokens[0].pos, tokens[-1].pos + 1) if tokens else (0, 0)
        self.ids = [token.token_id for token in tokens]
        self.texts = [SPECIAL_MARK if token.special else token.text for token in tokens]
        self.has_text = facts.adds_bos is not None
        self.pad_id = context.pad_id
        # From the padding mask, or else from the padding id.
        shared = (s for s in context.segments[:2] if s.kind is SegmentKind.SHARED)
        pads = (len(segment) for segment in shared if segment.label == "padding")
        self.n_pads = next(chain(pads, [_count_padding(self.ids, self.pad_id, facts)]), 0)
        self.first_unpadded = self.start + self.n_pads
        first = self.ids[self.n_pads : self.n_pads + 1]
        self.has_bos = facts.bos is not None and first == [facts.bos]
        spans = (piece for piece in self.pieces if piece.text is None)
        self.spans = tuple(sorted(spans, key=attrgetter("start")))
        self.paraphrases = tuple(s for s in context.segments if s.kind is SegmentKind.PARAPHRASE)

    @cached_property
    def located_pieces(self) -> tuple[LocatedPiece, ...]:
        """All pieces with their spans, in declared order."""
        located: list[LocatedPiece] = []
        after = self.n_pads
        for piece in self.pieces:
            span, n_places = self._find_piece(piece, after)
            overlaps = False
            if span is not None:
                taken = (one.span for one in located if one.span is not None)
                overlaps = any(span[0] < stop and start < span[1] for start, stop in taken)
                after = span[1] - self.start
            located.append(LocatedPiece(piece, span, overlaps, n_places))
        return tuple(located)

    @property
    def found_pieces(self) -> list[tuple[LocatedPiece, Span]]:
        """The pieces that were found, each with its span."""
        return [(one, one.span) for one in self.located_pieces if one.span is not None]

    @property
    def is_complete(self) -> bool:
        """Whether every declared piece is in the prompt."""
        found = self.found_pieces
        return len(found) == len(self.pieces) and all(span[1] <= self.stop for _, span in found)

    @property
    def token_lengths(self) -> tuple[tuple[int, int], ...]:
        """For each text that was found, its number of tokens alone and in the prompt."""
        texts = [(one.piece, span) for one, span in self.found_pieces if one.piece.text is not None]
        return tuple((len(piece.ids), stop - start) for piece, (start, stop) in texts if piece.ids)

    def _find_piece(self, piece: DeclaredSegment, after: int) -> tuple[Span | None, int]:
        """Return the span of a piece, and how often its text occurs."""
        if piece.text is None:
            return (piece.start, piece.stop), 1
        # After the previous piece first, then from the beginning.
        searches = (*self._search(piece, after), *self._search(piece, self.n_pads))
        for start, stop in chain.from_iterable(searches):
            everywhere = self._search(piece, self.n_pads)
            counts = [len(list(islice(places, MAX_COUNTED_PLACES))) for places in everywhere]
            return (self.start + start, self.start + stop), max(counts)
        return None, 0

    def _search(self, piece: DeclaredSegment, after: int) -> Iterator[Iterator[Span]]:
        """Yield the places of a text, as indices of tokens: by its ids, and by its characters."""
        yield records.find_id_spans(piece.ids, self.ids, after)
        if self.has_text:
            yield records.find_text_spans(piece.text or "", self.texts, after)

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


def _count_padding(ids: Sequence[int], pad: int | None, facts: records.TokenizerFacts) -> int:
    """Return how many padding tokens a prompt begins with.

    A padding token that is also the EOS counts from two on, or if the BOS follows it.
    """
    is_shared = pad is None and facts.pad is not None and facts.pad != facts.bos
    wanted = facts.pad if is_shared else pad
    n = next((n for n, id_ in enumerate(ids) if id_ != wanted), 0)
    is_padding = not is_shared or n > 1 or [*ids[n : n + 1]] == [facts.bos]
    return n if is_padding else 0


class SpanShift(NamedTuple):
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
    if prompt.has_text:
        if _spans_fit(prompt, spans, 0):
            return None
        n = _shift_by_lines(prompt, spans)
        offsets = _span_shifts_by_lines(prompt) if n is None else (n,) * len(spans)
        if offsets is not None:
            return SpanShift(offsets, "lines")
    for source, find in (("gaps", _shift_by_gaps), ("ends", _shift_by_ends)):
        n = find(prompt, spans)
        if n is not None:
            return SpanShift((n,) * len(spans), source) if n else None
    return None


def _undivided(parts: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
    edges = sorted({edge for part in parts for edge in (part.start, part.stop)})
    follows = dict(pairwise(edges))
    return tuple(part for part in parts if follows.get(part.start) == part.stop)


def candidate_shifts(prompt: PromptTokens) -> list[int]:
    """Shifts to try, the smallest first: up to `MAX_SHIFT`, and by the padding."""
    shifts = {*range(-MAX_SHIFT, MAX_SHIFT + 1), *_leading_lengths(prompt)} - {0}
    return sorted(shifts, key=lambda n: (abs(n), n < 0))


def _leading_lengths(prompt: PromptTokens) -> set[int]:
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
    shifts = _leading_lengths(prompt) if len(spans) == 1 else candidate_shifts(prompt)
    return next((n for n in shifts if _spans_fit(prompt, spans, n)), None)


def _span_shifts_by_lines(prompt: PromptTokens) -> tuple[int, ...] | None:
    """Offsets that grow from span to span; None unless each span has one."""
    offsets = []
    shifts = sorted(range(-_MAX_SPAN_SHIFT, _MAX_SPAN_SHIFT + 1), key=abs)
    for span in prompt.spans:
        fit = next((n for n in shifts if _spans_fit(prompt, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(offsets) < 3 and max(map(abs, offsets)) > 2:
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
    is_reliable = len(gaps) > 2 or width > 1
    shifts = candidate_shifts(prompt) if is_reliable else sorted(_leading_lengths(prompt))
    return next((n for n in (0, *shifts) if _gaps_are_equal(prompt, gaps, n)), None)


def _gaps_are_equal(prompt: PromptTokens, gaps: Sequence[Span], n: int) -> bool:
    offset = n - prompt.start
    if gaps[0][0] + offset < 0 or gaps[-1][1] + n > prompt.stop:
        return False
    moved = [slice(start + offset, stop + offset) for start, stop in gaps]
    if prompt.has_text and any(map(str.isalnum, "".join(prompt.texts[moved[0]]))):
        return False  # paraphrases have words in common
    return len({tuple(prompt.ids[gap]) for gap in moved}) == 1


def _shift_by_ends(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """The shift that moves a BOS out of the first span and the last span to the end."""
    first, n = spans[0], prompt.stop - spans[-1].stop
    is_paraphrase = any(segment.label == first.label for segment in prompt.paraphrases)
    if prompt.tokenizer.bos is None or not is_paraphrase:
        return None
    if n > 0 and prompt.has_bos and n == prompt.first_unpadded + 1 - first.start:
        return n
    if n == -1 and not prompt.has_bos and first.start == prompt.first_unpadded + 1:
        return n
    return None
