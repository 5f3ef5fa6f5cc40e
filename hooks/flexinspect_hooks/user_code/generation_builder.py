"""One watched generation in words: its prompt, its tokens as they come, its end.

It is gathered once per generation, and of many special tokens only those are kept that the rules
may have to name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from flexinspect.masks import algebra
from flexinspect.masks.algebra import MaskSpec
from flexinspect.records.prompt import (
    DeclaredSegment,
    Segment,
    TokenizerFacts,
    close_generated_segment,
    declaration_entries,
    segment_index,
)
from flexinspect.records.step import GenerationEnd, GenerationRecord, TokenRecord
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary
from flexinspect_hooks.observers.input_rows import InputRows
from flexinspect_hooks.user_code.declared_prompt import (
    PromptInput,
    SegmentSpec,
    build_segments,
    encode_or_empty,
)
from flexinspect_hooks.user_code.step_tracking import StepPlace


class TokenizerAdapter(Protocol):
    """What is asked of a vocabulary. Without `has_text`, only ids can be looked for."""

    @property
    def has_text(self) -> bool: ...
    @property
    def special(self) -> frozenset[int]: ...
    @property
    def facts(self) -> TokenizerFacts: ...
    def encode(self, text: str) -> Sequence[int]: ...
    def text_of(self, token_id: int) -> str: ...
    def token_of(self, token_id: int) -> str: ...
    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        ...

    def decode_generated(self, token_ids: Sequence[int]) -> str: ...


class TransformersAdapter:
    """The words of a transformers tokenizer."""

    has_text = True

    def __init__(self, tokenizer: Any) -> None:
        words = self._vocabulary = Vocabulary(tokenizer)
        self.special = words.special
        self.facts = tokenizer_facts(words)
        self.encode, self.text_of, self.token_of = words.encode, words.text_of, words.token_of

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        return TextStream(self._vocabulary).add

    def decode_generated(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return self._vocabulary.decode_generated(token_ids, one_line=False)


class IdAdapter:
    """Numbers in place of words, for a model that was given without its tokenizer."""

    has_text = False
    special: frozenset[int] = frozenset()
    facts = TokenizerFacts()

    def encode(self, text: str) -> list[int]:
        """Return the ids that are written in a text, nothing for any other text."""
        parts = text.replace(",", " ").split()
        return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else []

    def text_of(self, token_id: int) -> str:
        """Return the id."""
        return str(token_id)

    token_of = text_of

    def make_text_stream(self) -> Callable[[int], str]:
        """Return what writes an id, apart from the next one."""
        return "{} ".format

    def decode_generated(self, token_ids: Sequence[int]) -> str:
        """Return the ids."""
        return " ".join(map(str, token_ids))


@dataclass(frozen=True, slots=True)
class DeclaredPrompt:
    """What the user said of their own run: segments to find, and the mask that is meant."""

    tokenizer: TokenizerAdapter
    segments: tuple[SegmentSpec, ...] = ()
    mask: str | MaskSpec | None = None
    separators: str = "attached"
    config: TokenizerFacts = field(default_factory=TokenizerFacts)
    """What the model's configuration says of special tokens, for words that know none."""

    @property
    def mask_name(self) -> str:
        """The mask's name, as a generation states it."""
        if self.mask is None:
            return "not declared"
        return self.mask if isinstance(self.mask, str) else self.mask.name

    @property
    def facts(self) -> TokenizerFacts:
        """What is known of special tokens."""
        return self.tokenizer.facts if self.tokenizer.has_text else self.config

    def declaration(self, ids: Sequence[int], texts: Sequence[str]) -> Mapping[str, Any]:
        """Return the declared pieces, and what matters of special tokens for this prompt."""
        facts = keep_written_special(self.facts, ids, texts)
        return declaration_entries(
            to_declared_segments(self.segments, self.tokenizer.encode), facts
        )

    def declared_mask(self, segments: Sequence[Segment]) -> Mapping[str, Any]:
        """Return the declared mask of these segments, empty when none was declared."""
        if self.mask is None:
            return {}
        rule, said = self.mask, {}
        if isinstance(rule, str):
            rule = algebra.preset(rule, segments, separators=self.separators)
            said = {"separators": self.separators}
        facts = {"starts": rule.starts, "head": rule.prefix_stops, "low": rule.local_starts}
        return {"preset": rule.name, **said, **facts}


@dataclass(slots=True)
class GenerationBuilder:
    """A generation from its first forward on.

    The prompt is told in the model's thread, everything after it in the writer thread, in order.
    """

    tokenizer: TokenizerAdapter
    number: int
    record: GenerationRecord
    problems: list[str]
    added_text: Callable[[int], str]
    n_tokens: int
    next_position: int
    generated: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls, declared_prompt: DeclaredPrompt, place: StepPlace, rows: InputRows
    ) -> GenerationBuilder:
        """Begin with the rows that the first forward was fed."""
        words, add, ids = (
            declared_prompt.tokenizer,
            declared_prompt.tokenizer.make_text_stream(),
            rows.token_ids(),
        )
        known = ids if ids is not None else [-1] * place.n_new
        texts = [add(id_) for id_ in ids] if ids is not None else [""] * place.n_new
        n_pads = rows.n_pads()
        first = known[n_pads] if n_pads < len(known) else None
        has_bos = first is not None and first == declared_prompt.facts.bos
        searched = texts if words.has_text else ()
        prompt = PromptInput(known, searched, place.pos, n_pads, has_bos)
        segments, troubles = build_segments(declared_prompt.segments, prompt, words.encode)
        positions = rows.position_ids()
        told = positions or list(range(place.pos, prompt.stop))
        tokens = [
            _token_record(words, place.pos + n, id_, texts[n], told[n], segments, None)
            for n, id_ in enumerate(ids or ())
        ]
        record = GenerationRecord(
            generation=place.generation,
            sample_id=f"forward {place.generation}",
            mask=declared_prompt.mask_name,
            positions="contiguous" if _is_contiguous(told[n_pads:]) else "as fed",
            segments=segments,
            tokens=tuple(tokens),
            declared={
                **declared_prompt.declared_mask(segments),
                **declared_prompt.declaration(ids or (), texts if ids is not None else ()),
            },
            started_at=time.time(),
        )
        after = told[-1] + 1 if told else place.pos
        return cls(words, place.generation, record, troubles, add, prompt.stop, after)

    def input_tokens(self, rows: InputRows, place: StepPlace) -> tuple[TokenRecord, ...]:
        """Return the tokens that a later forward was given without anybody choosing them."""
        ids, positions = rows.token_ids(), rows.position_ids()
        return tuple(
            self._append_token(id_, positions[n] if positions else None, place.pos + n, None)
            for n, id_ in enumerate(ids or ())
        )

    def chosen_tokens(self, rows: InputRows, pos: int, step: int) -> tuple[TokenRecord, ...]:
        """Return the token that `step` chose: the last one of `rows`, at `pos`."""
        ids, positions = rows.token_ids(), rows.position_ids()
        if not ids:
            return ()
        self.generated.append(ids[-1])
        return (self._append_token(ids[-1], positions[-1] if positions else None, pos, step),)

    def _append_token(
        self, id_: int, position: int | None, pos: int, step: int | None
    ) -> TokenRecord:
        position = self.next_position if position is None else position
        self.next_position = position + 1
        self.n_tokens = pos + 1
        return _token_record(
            self.tokenizer, pos, id_, self.added_text(id_), position, self.record.segments, step
        )

    def end(self, state: str, reason: str, ended_at: float) -> GenerationEnd:
        """Return the end, with the segments as they came out."""
        segments = close_generated_segment(self.record.segments, self.n_tokens)
        answer = self.tokenizer.decode_generated(self.generated)
        return GenerationEnd(self.number, state, answer, segments, reason, ended_at)


def _token_record(
    tokenizer: TokenizerAdapter,
    pos: int,
    id_: int,
    text: str,
    position: int,
    segments: Sequence[Segment],
    step: int | None,
) -> TokenRecord:
    name, special = tokenizer.token_of(id_), id_ in tokenizer.special
    return TokenRecord(pos, id_, name, text, position, segment_index(segments, pos), special, step)


def _is_contiguous(positions: Sequence[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(positions))


def tokenizer_facts(vocabulary: Vocabulary) -> TokenizerFacts:
    """Return what a tokenizer says of special tokens, all of them."""
    tokenizer = vocabulary.tokenizer
    names = getattr(tokenizer, "all_special_tokens", ())
    special = dict(zip(map(str, names), map(int, tokenizer.all_special_ids), strict=False))
    bos, pad = (_id(getattr(tokenizer, f"{name}_token_id", None)) for name in ("bos", "pad"))
    eos = _token_ids(getattr(tokenizer, "eos_token_id", None))
    return TokenizerFacts(bos, eos, pad, _adds_bos(vocabulary), _adds_eos(vocabulary), special)


def config_facts(model: Any) -> TokenizerFacts:
    """Return what a model's configuration says of special tokens."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    bos, eos, pad = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return TokenizerFacts(_id(bos), _token_ids(eos), _id(pad))


def to_declared_segments(
    specs: Iterable[SegmentSpec], encode: Callable[[str], Sequence[int]]
) -> tuple[DeclaredSegment, ...]:
    """Return declared pieces as a trace keeps them."""
    return tuple(
        DeclaredSegment(one.label, one.start, one.stop)
        if one.text is None
        else DeclaredSegment(one.label, text=one.text, ids=encode_or_empty(one.text, encode))
        for one in specs
    )


def keep_written_special(
    facts: TokenizerFacts, ids: Sequence[int], texts: Sequence[str]
) -> TokenizerFacts:
    """Return the facts with those special tokens alone whose characters are among the words.

    `ids` and `texts` are those of the prompt; a special token itself is no word.
    """
    known = frozenset(facts.special.values())
    words = "".join(" " if i in known else text for i, text in zip(ids, texts, strict=True))
    return replace(facts, special={s: i for s, i in facts.special.items() if s and s in words})


def _adds_bos(vocabulary: Vocabulary) -> bool | None:
    try:
        return bool(vocabulary.default_bos())
    except Exception:  # a tokenizer with an `encode` of its own
        return None


def _adds_eos(vocabulary: Vocabulary) -> bool:
    try:
        return vocabulary.adds_eos()
    except Exception:  # as above
        return False


def _id(value: Any) -> int | None:
    return next(iter(_token_ids(value)), None)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return one id or a list of them, as configurations have it."""
    found = value if isinstance(value, list | tuple) else (value,)
    return tuple(one for one in found if type(one) is int and one >= 0)
