"""The tokens of a prompt with its declared pieces.

`PromptTokens` locates the declared pieces in the input ids. `candidate_shifts` are the numbers of
tokens by which borders may be off.
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


def _undivided(parts: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
    edges = sorted({edge for part in parts for edge in (part.start, part.stop)})
    follows = dict(pairwise(edges))
    return tuple(part for part in parts if follows.get(part.start) == part.stop)


def candidate_shifts(prompt: PromptTokens) -> list[int]:
    """Shifts to try, the smallest first: up to `MAX_SHIFT`, and by the padding."""
    shifts = {*range(-MAX_SHIFT, MAX_SHIFT + 1), *leading_lengths(prompt)} - {0}
    return sorted(shifts, key=lambda n: (abs(n), n < 0))


def leading_lengths(prompt: PromptTokens) -> set[int]:
    """Numbers of tokens that can precede the first word: the BOS, the padding, or both."""
    bos = int(prompt.has_bos)
    return {bos, prompt.n_pads, prompt.n_pads + bos} - {0}
