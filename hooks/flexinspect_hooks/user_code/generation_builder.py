"""Builds the records of a watched generation: its prompt, its tokens, its end.

Also the declared prompt, and the facts about special tokens. Of many special tokens a trace keeps
only those whose text occurs in the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from flexinspect.core.errors import UsageError
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
from flexinspect_hooks.loading.tokenizers import TokenizerAdapter, special_ids, token_record
from flexinspect_hooks.observers.input_rows import InputRows
from flexinspect_hooks.user_code.declared_segments import (
    PromptInput,
    SegmentSpec,
    build_segments,
    encode_or_empty,
)
from flexinspect_hooks.user_code.step_tracking import StepPlace


def check_declared_mask(mask: object) -> None:
    """Raise `UsageError` unless `mask` is None, the name of a preset, or a `MaskSpec`."""
    if isinstance(mask, str):
        algebra.check_preset(mask)
    elif mask is not None and not isinstance(mask, MaskSpec):
        raise UsageError(
            "mask must be the name of a preset or a flexinspect.masks.algebra.MaskSpec."
        )


@dataclass(frozen=True, slots=True)
class DeclaredPrompt:
    """What the user declared about a run: segments to find, and the mask."""

    tokenizer: TokenizerAdapter
    segments: tuple[SegmentSpec, ...] = ()
    mask: str | MaskSpec | None = None
    separators: str = "attached"
    config: TokenizerFacts = field(default_factory=TokenizerFacts)
    """Special tokens of the model's configuration, for a tokenizer adapter that has none."""

    @property
    def mask_name(self) -> str:
        """The declared mask's name for the generation's record."""
        if self.mask is None:
            return "not declared"
        return self.mask if isinstance(self.mask, str) else self.mask.name

    @property
    def facts(self) -> TokenizerFacts:
        """The known special tokens."""
        return self.tokenizer.facts if self.tokenizer.has_text else self.config

    def declaration(self, ids: Sequence[int], texts: Sequence[str]) -> Mapping[str, Any]:
        """Return the declared segments, and the special tokens that matter for this prompt."""
        facts = keep_written_special(self.facts, ids, texts)
        return declaration_entries(
            to_declared_segments(self.segments, self.tokenizer.encode), facts
        )

    def declared_mask(self, segments: Sequence[Segment]) -> Mapping[str, Any]:
        """Return the declared mask for these segments, empty if none was declared."""
        if self.mask is None:
            return {}
        if isinstance(self.mask, MaskSpec):
            return algebra.spec_entries(self.mask)
        spec = algebra.preset(self.mask, segments, separators=self.separators)
        return {**algebra.spec_entries(spec), "separators": self.separators}


@dataclass(slots=True)
class GenerationBuilder:
    """Builds a generation from its first forward on.

    The prompt is built in the model's thread, everything after it in the writer thread, in order.
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
        """Begin with the input rows of the first forward."""
        tokenizer, ids = declared_prompt.tokenizer, rows.token_ids()
        add_text = tokenizer.make_text_stream()
        known = ids if ids is not None else [-1] * place.n_new
        texts = [add_text(id_) for id_ in ids] if ids is not None else [""] * place.n_new
        n_pads = rows.n_pads()
        first = known[n_pads] if n_pads < len(known) else None
        prompt = PromptInput(
            ids=known,
            texts=texts if tokenizer.has_text else (),
            start=place.pos,
            n_pads=n_pads,
            has_bos=first is not None and first == declared_prompt.facts.bos,
        )
        segments, problems = build_segments(declared_prompt.segments, prompt, tokenizer.encode)
        positions = rows.position_ids() or list(range(place.pos, prompt.stop))
        tokens = [
            token_record(
                tokenizer,
                pos=place.pos + n,
                token_id=id_,
                text=texts[n],
                position_id=positions[n],
                segment=segment_index(segments, place.pos + n),
                step=None,
            )
            for n, id_ in enumerate(ids or ())
        ]
        record = GenerationRecord(
            generation=place.generation,
            sample_id=f"forward {place.generation}",
            mask=declared_prompt.mask_name,
            positions="contiguous" if _is_contiguous(positions[n_pads:]) else "as fed",
            segments=segments,
            tokens=tuple(tokens),
            declared={
                **declared_prompt.declared_mask(segments),
                **declared_prompt.declaration(ids or (), texts if ids is not None else ()),
            },
            started_at=time.time(),
        )
        return cls(
            tokenizer=tokenizer,
            number=place.generation,
            record=record,
            problems=problems,
            added_text=add_text,
            n_tokens=prompt.stop,
            next_position=positions[-1] + 1 if positions else place.pos,
        )

    def input_tokens(self, rows: InputRows, place: StepPlace) -> tuple[TokenRecord, ...]:
        """Return the input tokens of a later forward that no step chose."""
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
        return token_record(
            self.tokenizer,
            pos=pos,
            token_id=id_,
            text=self.added_text(id_),
            position_id=position,
            segment=segment_index(self.record.segments, pos),
            step=step,
        )

    def end(self, state: str, reason: str, ended_at: float) -> GenerationEnd:
        """Return the end of the generation, with the final segments."""
        segments = close_generated_segment(self.record.segments, self.n_tokens)
        answer = self.tokenizer.decode_generated(self.generated)
        return GenerationEnd(self.number, state, answer, segments, reason, ended_at)


def _is_contiguous(positions: Sequence[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(positions))


def config_facts(model: Any) -> TokenizerFacts:
    """Return the special tokens of a model's configuration."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    return TokenizerFacts(*special_ids(config))


def to_declared_segments(
    specs: Iterable[SegmentSpec], encode: Callable[[str], Sequence[int]]
) -> tuple[DeclaredSegment, ...]:
    """Return declared segments as a trace stores them."""
    return tuple(
        DeclaredSegment(spec.label, spec.start, spec.stop)
        if spec.text is None
        else DeclaredSegment(spec.label, text=spec.text, ids=encode_or_empty(spec.text, encode))
        for spec in specs
    )


def keep_written_special(
    facts: TokenizerFacts, ids: Sequence[int], texts: Sequence[str]
) -> TokenizerFacts:
    """Return the facts with only those special tokens that the prompt spells out as text.

    `ids` and `texts` are those of the prompt; the special tokens themselves do not count as text.
    """
    known = frozenset(facts.special.values())
    prompt = "".join(" " if i in known else text for i, text in zip(ids, texts, strict=True))
    return replace(facts, special={s: i for s, i in facts.special.items() if s and s in prompt})
