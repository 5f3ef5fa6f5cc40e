"""What was fed and what was declared of it, as the rules of the family `segments` look at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from flexinspect.pieces import (
    DeclaredSegment,
    Span,
    TokenizerFacts,
    declared_segments,
    declared_tokenizer,
    find_id_spans,
    find_text_spans,
)
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import TokenRecord
from flexinspect.rules.scene import RuleContext

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
