"""Builds the records of a watched generation: its prompt, its segments, its tokens, its end.

Declared segments are spans, or texts that are searched in the prompt. Of many special tokens a
trace keeps only those whose text occurs in the prompt.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.masks import mask_presets
from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records import prompt as prompt_records
from flexinspect.records.prompt import (
    DeclaredSegment,
    PromptPart,
    Segment,
    SegmentKind,
    TokenizerFacts,
)
from flexinspect.records.step import GenerationEnd, GenerationRecord, TokenRecord
from flexinspect_hooks.loading.tokenizers import TokenizerAdapter, special_ids, token_record
from flexinspect_hooks.observers.inputs_hook import InputRows
from flexinspect_hooks.user_code.prompt_parts import prompt_parts
from flexinspect_hooks.user_code.step_tracking import StepPlace

# -- what the user declared ------------------------------------------------------------------------

SegmentArgument = tuple[int, int, str] | tuple[str, str] | str
"""A span (start, stop, label), a (text, label), or a text that is its own label."""

Specs = Sequence[DeclaredSegment]
Span = tuple[int, int, str]

_MAX_LABEL = 24


def parse_segments(segments: Iterable[object] | None) -> tuple[DeclaredSegment, ...]:
    """Check declared segments. Raises `UsageError` for an invalid one and for overlapping spans."""
    specs = tuple(_parse_segment(segment) for segment in segments or ())
    spans = sorted((spec.start, spec.stop, spec.label) for spec in specs if spec.text is None)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise UsageError(f"The segments '{first}' and '{second}' overlap at position {start}.")
    return specs


def _parse_segment(segment: object) -> DeclaredSegment:
    match segment:
        case str(text) if text:
            label = text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
            return DeclaredSegment(label, text=text)
        case (str(text), str(label)) if text:
            return DeclaredSegment(label, text=text)
        case (int(start), int(stop), str(label)) if 0 <= start < stop:
            return DeclaredSegment(label, int(start), int(stop))
    raise UsageError(
        f"{segment!r} is not a segment.",
        hint="A segment is (start, stop, label) with 0 <= start < stop, a text, or (text, label).",
    )


def encode_segments(
    segments: Iterable[DeclaredSegment], encode: Callable[[str], Sequence[int]]
) -> tuple[DeclaredSegment, ...]:
    """Return the segments with the ids of their texts, none for one that cannot be encoded."""

    def ids(text: str) -> tuple[int, ...]:
        try:
            return tuple(map(int, encode(text)))  # numpy's would not be plain
        except UsageError:
            return ()

    return tuple(replace(one, ids=ids(one.text)) if one.text else one for one in segments)


def check_declared_mask(mask: object) -> None:
    """Raise `UsageError` unless `mask` is None, the name of a preset, or a `MaskSpec`."""
    if isinstance(mask, str):
        mask_presets.check_preset(mask, "For another mask, pass a MaskSpec, or leave mask out.")
    elif mask is not None and not isinstance(mask, MaskSpec):
        raise UsageError(
            "mask must be the name of a preset or a flexinspect.masks.mask_presets.MaskSpec."
        )


class DeclaredPrompt(Struct, frozen=True):
    """What the user declared about a run: segments to find, and the mask."""

    tokenizer: TokenizerAdapter
    segments: tuple[DeclaredSegment, ...] = ()
    mask: str | MaskSpec | None = None
    separators: str = "attached"
    config: TokenizerFacts = field(default_factory=TokenizerFacts)
    """Special tokens of the model's configuration, for a tokenizer adapter that has none."""

    @property
    def facts(self) -> TokenizerFacts:
        """The known special tokens."""
        return self.tokenizer.facts if self.tokenizer.has_text else self.config

    def with_config(self, model: Any) -> DeclaredPrompt:
        """Return this with the special tokens of a model's configuration."""
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", None) or config
        return replace(self, config=TokenizerFacts(*special_ids(config)))

    def mask_entries(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the declared mask for these segments.

        Empty if none was declared, or if it was declared for texts of which this prompt has none:
        a program may have several prompts.
        """
        labels = {segment.label for segment in segments}
        are_texts = bool(self.segments) and all(one.text is not None for one in self.segments)
        is_other_prompt = are_texts and labels.isdisjoint(one.label for one in self.segments)
        if self.mask is None or is_other_prompt:
            return {}
        if isinstance(self.mask, MaskSpec):
            return mask_presets.spec_entries(self.mask)
        spec = mask_presets.preset(self.mask, segments, separators=self.separators)
        return {**mask_presets.spec_entries(spec), "separators": self.separators}


def keep_written_special(
    facts: TokenizerFacts, ids: Sequence[int], texts: Sequence[str]
) -> TokenizerFacts:
    """Return the facts with only those special tokens that the prompt's text spells out."""
    known = frozenset(facts.special.values())
    prompt = "".join(" " if i in known else text for i, text in zip(ids, texts, strict=True))
    return replace(facts, special={s: i for s, i in facts.special.items() if s and s in prompt})


# -- the segments of a prompt ----------------------------------------------------------------------


class PromptInput(Struct, frozen=True):
    """A prompt as a forward received it, from position `start` on: its ids, and their texts.

    `texts` is empty if texts cannot be searched. The first `n_pads` ids are padding; with `has_bos`
    a BOS follows them.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    start: int = 0
    n_pads: int = 0
    has_bos: bool = False

    @property
    def stop(self) -> int:
        """The position after the prompt."""
        return self.start + len(self.ids)


def build_segments(specs: Specs, prompt: PromptInput) -> tuple[tuple[Segment, ...], list[str]]:
    """Return segments without gaps over the prompt and generated tokens, and a list of problems.

    A declared segment that is not found, or lies outside, is left out and reported. A label whose
    first word names a kind (bos, shared, separator, cue) has that kind, any other is a paraphrase.
    Undeclared positions are padding, BOS, "shared" before the first segment, "separator" between
    two, "cue" after the last. Without declared segments the prompt is one segment.
    """
    problems: list[str] = []
    spans = list(_find_spans(specs, prompt, problems))
    begin = prompt.start + prompt.n_pads
    # Each part begins where the one before it stops; empty ones are left out below.
    parts = [
        (prompt.start, "before watching", SegmentKind.SHARED),
        (begin, "padding", SegmentKind.SHARED),
    ]
    if not spans:
        parts.append((prompt.stop, "prompt", SegmentKind.SHARED))
    else:
        first, last = spans[0][0], spans[-1][1]
        parts.append((begin + (prompt.has_bos and begin < first), "bos", SegmentKind.BOS))
        parts.append((first, "shared", SegmentKind.SHARED))
        for number, (start, stop, label) in enumerate(spans):
            parts.append((start, f"separator {number}", SegmentKind.SEPARATOR))
            parts.append((stop, label, _segment_kind(label)))
        after_last = last + _separator_after(spans, prompt)
        parts.append((after_last, f"separator {len(spans)}", SegmentKind.SEPARATOR))
        parts.append((prompt.stop, "cue", SegmentKind.CUE))
    parts.append((prompt.stop + 1, "generated", SegmentKind.GENERATED))
    segments: list[Segment] = []
    pos = 0
    for stop, label, kind in parts:
        if stop > pos:
            is_attached = kind is SegmentKind.SEPARATOR and segments
            owner = segments[-1].owner if is_attached else len(segments)
            segments.append(Segment(pos, stop, label, kind, owner))
            pos = stop
    return tuple(segments), problems


def _segment_kind(label: str) -> SegmentKind:
    word = label.split()[0].lower() if label.split() else ""
    named = {str(kind) for kind in SegmentKind} - {SegmentKind.GENERATED}
    return SegmentKind(word) if word in named else SegmentKind.PARAPHRASE


def _separator_after(spans: list[Span], prompt: PromptInput) -> int:
    """Return the length of the separator after the last span, if it stands between all spans."""
    if _segment_kind(spans[-1][2]) is not SegmentKind.PARAPHRASE:
        return 0
    between = {
        tuple(prompt.ids[before[1] - prompt.start : after[0] - prompt.start])
        for before, after in pairwise(spans)
    }
    separator = between.pop() if len(between) == 1 else ()
    rest = tuple(prompt.ids[spans[-1][1] - prompt.start :])
    is_same = len(rest) > len(separator) and rest[: len(separator)] == separator
    return len(separator) if is_same else 0


def _find_spans(specs: Specs, prompt: PromptInput, problems: list[str]) -> Iterator[Span]:
    """Yield (start, stop, label) in order; each text is searched after the segment before it."""
    spans: list[Span] = []
    after = 0
    for spec in specs:
        if spec.text is None:
            start, stop = spec.start, min(spec.stop, prompt.stop)
            if spec.stop > prompt.stop:
                problems.append(
                    f"Segment '{spec.label}' was declared up to position {spec.stop}, but the "
                    f"prompt ends at {prompt.stop}."
                )
        else:
            start, stop = _find_text(spec, prompt, after)
            if start == stop:
                problems.append(f"The text of segment '{spec.label}' is not in the prompt.")
        if prompt.start <= start < stop:
            spans.append((start, stop, spec.label))
            after = stop - prompt.start
    pos = prompt.start
    for start, stop, label in sorted(spans):
        if start < pos:
            problems.append(f"Segment '{label}' overlaps the one before it and is left out.")
            continue
        pos = stop
        yield start, stop, label


def _find_text(spec: DeclaredSegment, prompt: PromptInput, after: int) -> tuple[int, int]:
    """Return the span (start, stop) of a text, found by its ids, else by texts; else (0, 0).

    The ids of a text may differ in the prompt (a leading space, a merge with its neighbour), so the
    second search takes every token that contains a part of the text.
    """
    for begin in dict.fromkeys((after, prompt.n_pads)):
        by_ids = prompt_records.find_id_spans(spec.ids, prompt.ids, begin)
        by_text = prompt_records.find_text_spans(spec.text or "", prompt.texts, begin)
        for start, stop in chain(by_ids, by_text):
            return prompt.start + start, prompt.start + stop
    return 0, 0


# -- the records of a generation -------------------------------------------------------------------


class GenerationBuilder:
    """Builds a generation from its first forward on, whose input rows are `rows`.

    The prompt is built in the model's thread, everything after it in the writer thread, in order.
    `record` is the generation's record, `problems` those of its declared segments.
    """

    def __init__(
        self, declared_prompt: DeclaredPrompt, place: StepPlace, rows: InputRows, model: str = ""
    ) -> None:
        self._tokenizer = tokenizer = declared_prompt.tokenizer
        self._added_text = tokenizer.make_text_stream()
        self._generated = array("q")  # 8 bytes a token, for the answer at the end
        facts, mask, n_pads = declared_prompt.facts, declared_prompt.mask, rows.n_pads()
        token_ids = rows.token_ids()
        ids: Sequence[int] = token_ids or ()
        texts = [self._added_text(id_) for id_ in ids]
        prompt = PromptInput(
            ids=[-1] * place.n_new if token_ids is None else ids,
            texts=texts if tokenizer.has_text else (),
            start=place.pos,
            n_pads=n_pads,
            has_bos=facts.bos is not None and facts.bos in ids[n_pads : n_pads + 1],
        )
        specs = encode_segments(declared_prompt.segments, tokenizer.encode)
        segments, self.problems = build_segments(specs, prompt)
        positions = rows.position_ids() or list(range(place.pos, prompt.stop))
        self._next_position = positions[-1] + 1 if positions else place.pos
        self._n_tokens = prompt.stop
        special = keep_written_special(facts, ids, texts)
        is_contiguous = all(b - a == 1 for a, b in pairwise(positions[n_pads:]))
        parts: Sequence[PromptPart] = ()
        # A text is looked for in the prompt, so only positions can be wrong.
        has_positions = any(spec.text is None for spec in specs)
        if (has_positions or (mask is None and not specs)) and not place.pos:
            parts = prompt_parts(ids, n_pads)
        self.record = GenerationRecord(
            generation=place.generation,
            sample_id=f"forward {place.generation}",
            mask="not declared" if mask is None else getattr(mask, "name", str(mask)),
            positions="contiguous" if is_contiguous else "as passed",
            segments=segments,
            tokens=tuple(
                token_record(tokenizer, pos, *token, prompt_records.segment_index(segments, pos))
                for pos, token in enumerate(zip(ids, texts, positions, strict=False), place.pos)
            ),
            declared={
                **declared_prompt.mask_entries(segments),
                **prompt_records.declaration_entries(specs, special),
                **({"parts": to_builtins(parts)} if parts else {}),
            },
            started_at=time.time(),
            model=model,
        )

    def append_tokens(
        self, rows: InputRows, pos: int, step: int | None = None
    ) -> tuple[TokenRecord, ...]:
        """Return the input tokens of a later forward, which no step chose, from `pos` on.

        With `step`, only the last one, which that step chose.
        """
        ids, positions = rows.token_ids() or [], rows.position_ids() or []
        if step is not None:
            ids, positions = ids[-1:], positions[-1:]
            self._generated.extend(ids)
        records = []
        for n, id_ in enumerate(ids):
            position = positions[n] if positions else self._next_position
            self._next_position, self._n_tokens = position + 1, pos + n + 1
            text = self._added_text(id_)
            place = (position, prompt_records.segment_index(self.record.segments, pos + n), step)
            records.append(token_record(self._tokenizer, pos + n, id_, text, *place))
        return tuple(records)

    def end(self, state: str, reason: str, ended_at: float) -> GenerationEnd:
        """Return the end of the generation, with the final segments."""
        segments = prompt_records.close_generated_segment(self.record.segments, self._n_tokens)
        answer = self._tokenizer.decode_generated(self._generated.tolist())
        return GenerationEnd(self.record.generation, state, answer, segments, reason, ended_at)
