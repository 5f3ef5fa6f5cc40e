"""The context that all rules of a run share: the generation, its tokens, and the executed masks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import Positions, format_layers, plural, printable
from flexinspect.masks import mask_presets
from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records import prompt
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord, MaskRecord, StepRecord, TokenRecord

MASK_CACHE_BYTES = 128 << 20  # bytes of mask cells that are kept; the oldest are dropped first
MAX_GENERATED_TOKENS = 1 << 14
"""Newest generated tokens that are kept beside the prompt: rules look at the last few, and quote
others. A token takes about 300 bytes, in the process of the model."""
_MAX_TEXT_LENGTH = 24  # characters of a token that a sentence quotes


class DeclaredMask(NamedTuple):
    """The mask that the user declared, or the one assumed from declared segments.

    `assumed` means that several paraphrases but no mask were declared, so they are assumed to be
    isolated from each other. A finding that rests on this says so, and is at most a warning.
    """

    spec: MaskSpec
    assumed: bool = False


class RuleContext:
    """Segments, tokens and masks of a run. The `RuleRunner` fills it, and rules read it.

    `find_mask` looks up a mask that is no longer in memory (when a trace is read back).
    """

    def __init__(self, find_mask: Callable[[str], MaskRecord | None] = lambda _: None) -> None:
        self._find_mask = find_mask
        self.segments: tuple[Segment, ...] = ()  # of the generation; the last one has no end
        self._tokens: dict[int, TokenRecord] = {}
        self._masks: OrderedDict[str, MaskRecord] = OrderedDict()
        self._mask_bytes = 0
        self.generation = GenerationRecord(0, "", "", "", (), ())
        self.declared_mask: DeclaredMask | None = None
        self.is_standalone = False
        self.has_paged_keys = False  # columns of this generation's masks are slots of a pool
        self.shared_memory: dict[str, Any] = {}  # shared by the models of a run, by rule name
        self.has_custom_mask_mod = False  # a function of the user, whose intent is unknown
        self.forced_tokens: frozenset[tuple[int, int]] = frozenset()
        """Branch and step of tokens that the user chose, which no decoding did."""

    def start_generation(
        self, generation: GenerationRecord, *, is_standalone: bool = False
    ) -> None:
        """Read a generation's segments and prompt; masks are kept.

        `is_standalone` marks a call of FlexAttention outside of any model: a generation of one
        step, without tokens, segments or a declared mask.
        """
        self.generation, self.is_standalone = generation, is_standalone
        self.has_paged_keys = False
        self.segments = generation.segments
        self._tokens = {token.pos: token for token in generation.tokens}
        self.declared_mask = _find_declared_mask(generation)
        self.has_custom_mask_mod = self.declared_mask is None and _has_mask_declaration(generation)

    def add_step(self, step: StepRecord) -> None:
        """Add the tokens that a step chose, and its new masks."""
        for token in step.tokens:
            self._tokens[token.pos] = token
            oldest = token.pos - MAX_GENERATED_TOKENS
            if oldest >= self.n_prompt:
                self._tokens.pop(oldest, None)
        for mask in step.masks:
            self._cache_mask(mask)

    @property
    def declared_spec(self) -> MaskSpec | None:
        """The mask that the user declared; None if there is none, or if it is only assumed."""
        declared = self.declared_mask
        return None if declared is None or declared.assumed else declared.spec

    def mask(self, fingerprint: str | None) -> MaskRecord | None:
        """Return the mask with a fingerprint, or None if it is not known."""
        if fingerprint is None:
            return None
        known = self._masks.get(fingerprint) or self._find_mask(fingerprint)
        if known is not None:
            self._cache_mask(known)
        return known

    def _cache_mask(self, mask: MaskRecord) -> None:
        if mask.fingerprint in self._masks:
            return
        self._masks[mask.fingerprint] = mask
        self._mask_bytes += _mask_nbytes(mask)
        while self._mask_bytes > MASK_CACHE_BYTES and len(self._masks) > 1:
            self._mask_bytes -= _mask_nbytes(self._masks.popitem(last=False)[1])

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token, None if it is also that of the BOS or an EOS."""
        tokenizer = prompt.declared_tokenizer(self.generation.declared)
        return None if tokenizer.pad in (tokenizer.bos, *tokenizer.eos) else tokenizer.pad

    @property
    def n_prompt(self) -> int:
        """Number of prompt positions: where the last segment, which has no end, starts."""
        return self.segments[-1].start if self.segments else 0

    def token(self, pos: int) -> TokenRecord | None:
        """Return the token at a position, or None if it is not known."""
        return self._tokens.get(pos)

    def segment_at(self, pos: int) -> Segment | None:
        """Return the segment that holds a position, or None."""
        return next((s for s in self.segments if s.start <= pos < self._stop_of(s)), None)

    def _stop_of(self, segment: Segment) -> int:
        """Return where a segment ends; the last one has no end."""
        return sys.maxsize if segment is self.segments[-1] else segment.stop

    def format_position(self, pos: int) -> str:
        """Return `position 14 "What"`, without the text where the token is not known."""
        token = self._tokens.get(pos)
        text = printable((token.text or token.token) if token is not None else "")
        if len(text) > _MAX_TEXT_LENGTH:
            text = text[: _MAX_TEXT_LENGTH - 1] + "…"
        return f'position {pos} "{text}"' if text else f"position {pos}"

    def format_rows(self, positions: Positions) -> str:
        """Return `12 rows of paraphrase 2 and separator 2`, positions ascending."""
        rows, labels = plural(len(positions), "row"), self.labels_at(positions)
        return f"{rows} of {abbreviate_labels(labels)}" if labels else rows

    def format_first_position(self, positions: Positions) -> str:
        """Return `first: position 14 "What"`, without "first" for a single position."""
        return ("first: " if len(positions) > 1 else "") + self.format_position(int(positions[0]))

    def labels_at(self, positions: Positions) -> list[str]:
        """Return the labels of the segments that hold some of the positions, in order."""
        spans = ((s.label, s.start, self._stop_of(s)) for s in self.segments)
        return [a for a, start, stop in spans if ((positions >= start) & (positions < stop)).any()]


def abbreviate_labels(labels: Sequence[str]) -> str:
    """Return `paraphrase 1 and paraphrase 2`, or `paraphrase 1 and 2 other segments`."""
    names = [printable(label) for label in labels]
    return " and ".join(names if len(names) < 3 else [names[0], f"{len(names) - 1} other segments"])


def step_array(step: StepRecord, stream: str) -> npt.NDArray[Any] | None:
    """Return the first array of a stream of a step, or None."""
    return next((record.array for record in step.arrays if record.stream == stream), None)


def read_unpadded(step: StepRecord) -> mask_presets.BoolArray | None:
    """Return which positions of batch row 0 the received 2D attention mask keeps, or None."""
    mask = step_array(step, "inputs.mask")
    return None if mask is None or not len(mask) else np.asarray(mask[0], np.bool_)


def format_step_layers(layers: Iterable[int], step: StepRecord) -> str:
    """Return `layer 3`, `layers 0-2` or `all 8 layers`, of the layers with calls in a step."""
    return format_layers(sorted(set(layers)), len({call.layer for call in step.calls}))


def _find_declared_mask(generation: GenerationRecord) -> DeclaredMask | None:
    spec, segments = mask_presets.declared_spec(generation.declared), generation.segments
    if spec is not None:
        return DeclaredMask(spec)
    n_paraphrases = sum(segment.kind is SegmentKind.PARAPHRASE for segment in segments)
    if _has_mask_declaration(generation) or n_paraphrases < 2:
        return None
    return DeclaredMask(mask_presets.preset("segment-isolation", segments), assumed=True)


def _has_mask_declaration(generation: GenerationRecord) -> bool:
    return not {*generation.declared} <= {*prompt.DECLARED_SEGMENT_KEYS}


def _mask_nbytes(mask: MaskRecord) -> int:
    arrays = (mask.cells, mask.uniform_rows, mask.partial, mask.full, mask.mask_mod_blocks)
    return 512 + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
