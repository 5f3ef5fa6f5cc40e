"""One watched generation in words: its prompt, its tokens as they come, its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from flexinspect import masks
from flexinspect.masks import MaskRule
from flexinspect.pieces import WordFacts, to_declared
from flexinspect.prompts import Segment, close_generated, segment_of
from flexinspect.records import GenerationEnd, GenerationRecord, TokenRecord
from flexinspect_hooks.fedrows import FedRows
from flexinspect_hooks.saidwords import facts_of_tokenizer, pieces_of, written_special
from flexinspect_hooks.sequence import Place
from flexinspect_hooks.spans import FedPrompt, Wanted, lay_out
from flexinspect_hooks.vocabulary import TextStream, Vocabulary


class Words(Protocol):
    """What is asked of a vocabulary. Without `has_text`, only ids can be looked for."""

    @property
    def has_text(self) -> bool: ...
    @property
    def special(self) -> frozenset[int]: ...
    @property
    def facts(self) -> WordFacts: ...
    def encode(self, text: str) -> Sequence[int]: ...
    def text_of(self, token_id: int) -> str: ...
    def token_of(self, token_id: int) -> str: ...
    def adder(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        ...

    def answer(self, token_ids: Sequence[int]) -> str: ...


class TokenizerWords:
    """The words of a transformers tokenizer."""

    has_text = True

    def __init__(self, tokenizer: Any) -> None:
        words = self._words = Vocabulary(tokenizer)
        self.special = words.special
        self.facts = facts_of_tokenizer(words)
        self.encode, self.text_of, self.token_of = words.encode, words.text_of, words.token_of

    def adder(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        return TextStream(self._words).add

    def answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return self._words.answer(token_ids, one_line=False)


class IdWords:
    """Numbers in place of words, for a model that was given without its tokenizer."""

    has_text = False
    special: frozenset[int] = frozenset()
    facts = WordFacts()

    def encode(self, text: str) -> list[int]:
        """Return the ids that are written in a text, nothing for any other text."""
        parts = text.replace(",", " ").split()
        return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else []

    def text_of(self, token_id: int) -> str:
        """Return the id."""
        return str(token_id)

    token_of = text_of

    def adder(self) -> Callable[[int], str]:
        """Return what writes an id, apart from the next one."""
        return "{} ".format

    def answer(self, token_ids: Sequence[int]) -> str:
        """Return the ids."""
        return " ".join(map(str, token_ids))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said of their own run: segments to find, and the mask that is meant."""

    words: Words
    segments: tuple[Wanted, ...] = ()
    mask: str | MaskRule | None = None
    separators: str = "attached"
    config: WordFacts = field(default_factory=WordFacts)
    """What the model's configuration says of special tokens, for words that know none."""

    @property
    def mask_name(self) -> str:
        """The mask's name, as a generation states it."""
        if self.mask is None:
            return "not declared"
        return self.mask if isinstance(self.mask, str) else self.mask.name

    @property
    def facts(self) -> WordFacts:
        """What is known of special tokens."""
        return self.words.facts if self.words.has_text else self.config

    def said(self, ids: Sequence[int], texts: Sequence[str]) -> Mapping[str, Any]:
        """Return the declared pieces, and what matters of special tokens for this prompt."""
        facts = written_special(self.facts, ids, texts)
        return to_declared(pieces_of(self.segments, self.words.encode), facts)

    def declared(self, segments: Sequence[Segment]) -> Mapping[str, Any]:
        """Return the declared mask of these segments, empty when none was declared."""
        if self.mask is None:
            return {}
        rule, said = self.mask, {}
        if isinstance(rule, str):
            rule = masks.preset(rule, segments, separators=self.separators)
            said = {"separators": self.separators}
        facts = {"starts": rule.starts, "head": rule.head, "low": rule.low}
        return {"preset": rule.name, **said, **facts}


@dataclass(slots=True)
class Story:
    """A generation from its first forward on.

    The prompt is told in the model's thread, everything after it in the writer thread, in order.
    """

    words: Words
    number: int
    record: GenerationRecord
    troubles: list[str]
    add: Callable[[int], str]
    n_tokens: int
    next_position: int
    generated: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, wishes: Wishes, place: Place, rows: FedRows) -> Story:
        """Begin with the rows that the first forward was fed."""
        words, add, ids = wishes.words, wishes.words.adder(), rows.token_ids()
        known = ids if ids is not None else [-1] * place.n_new
        texts = [add(id_) for id_ in ids] if ids is not None else [""] * place.n_new
        n_pads = rows.n_pads()
        first = known[n_pads] if n_pads < len(known) else None
        has_bos = first is not None and first == wishes.facts.bos
        searched = texts if words.has_text else ()
        prompt = FedPrompt(known, searched, place.pos, n_pads, has_bos)
        segments, troubles = lay_out(wishes.segments, prompt, words.encode)
        positions = rows.position_ids()
        told = positions or list(range(place.pos, prompt.stop))
        tokens = [
            _token(words, place.pos + n, id_, texts[n], told[n], segments, None)
            for n, id_ in enumerate(ids or ())
        ]
        record = GenerationRecord(
            generation=place.generation,
            sample_id=f"forward {place.generation}",
            mask=wishes.mask_name,
            positions="contiguous" if _is_contiguous(told[n_pads:]) else "as fed",
            segments=segments,
            tokens=tuple(tokens),
            declared={
                **wishes.declared(segments),
                **wishes.said(ids or (), texts if ids is not None else ()),
            },
            started_at=time.time(),
        )
        after = told[-1] + 1 if told else place.pos
        return cls(words, place.generation, record, troubles, add, prompt.stop, after)

    def given(self, rows: FedRows, place: Place) -> tuple[TokenRecord, ...]:
        """Return the tokens that a later forward was given without anybody choosing them."""
        ids, positions = rows.token_ids(), rows.position_ids()
        return tuple(
            self._next(id_, positions[n] if positions else None, place.pos + n, None)
            for n, id_ in enumerate(ids or ())
        )

    def chosen(self, rows: FedRows, pos: int, step: int) -> tuple[TokenRecord, ...]:
        """Return the token that `step` chose: the last one of `rows`, at `pos`."""
        ids, positions = rows.token_ids(), rows.position_ids()
        if not ids:
            return ()
        self.generated.append(ids[-1])
        return (self._next(ids[-1], positions[-1] if positions else None, pos, step),)

    def _next(self, id_: int, position: int | None, pos: int, step: int | None) -> TokenRecord:
        position = self.next_position if position is None else position
        self.next_position = position + 1
        self.n_tokens = pos + 1
        return _token(self.words, pos, id_, self.add(id_), position, self.record.segments, step)

    def end(self, state: str, reason: str, ended_at: float) -> GenerationEnd:
        """Return the end, with the segments as they came out."""
        segments = close_generated(self.record.segments, self.n_tokens)
        answer = self.words.answer(self.generated)
        return GenerationEnd(self.number, state, answer, segments, reason, ended_at)


def _token(
    words: Words,
    pos: int,
    id_: int,
    text: str,
    position: int,
    segments: Sequence[Segment],
    step: int | None,
) -> TokenRecord:
    name, special = words.token_of(id_), id_ in words.special
    return TokenRecord(pos, id_, name, text, position, segment_of(segments, pos), special, step)


def _is_contiguous(positions: Sequence[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(positions))
