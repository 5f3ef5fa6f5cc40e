"""What all rules know of the run they look at: the generation, its words, and the masks met."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexinspect import masks, pieces
from flexinspect.masks import MaskRule
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import GenerationRecord, MaskRecord, StepRecord, TokenRecord
from flexinspect.rules.words import Positions, counted, printable

MASK_BYTES = 128 << 20
"""Bytes of cells that are remembered; the mask met longest ago is forgotten first."""

_WORD = 24


@dataclass(frozen=True, slots=True)
class Intent:
    """The mask that is meant, as a rule; `assumed` when only segments were declared.

    Whoever names several paraphrases and no mask is taken to mean that they do not see each other;
    a finding that stands on that says so, and is no error.
    """

    rule: MaskRule
    assumed: bool = False


class Scene:
    """One run as its steps come: segments, tokens and masks. Rules read it, the book fills it.

    `find_mask` looks up a mask that is no longer remembered (of a trace that is read again).
    """

    def __init__(self, find_mask: Callable[[str], MaskRecord | None] | None = None) -> None:
        self._find_mask = find_mask
        self._segments: tuple[Segment, ...] = ()
        self._tokens: dict[int, TokenRecord] = {}
        self._masks: OrderedDict[str, MaskRecord] = OrderedDict()
        self._mask_bytes = 0
        self.generation = GenerationRecord(0, "", "", "", (), ())
        self.intent: Intent | None = None
        self.is_loose = False
        self.shared: dict[str, Any] = {}
        """What rules of one name remember across the models of a run, by that name."""
        self.has_own_rule = False
        """Whether a function of the user's own is the declared mask: what it means is not known."""

    def begin(self, generation: GenerationRecord, *, is_loose: bool = False) -> None:
        """Take a generation's segments and prompt; masks stay known.

        `is_loose` tells of a call of FlexAttention outside of any model: a generation of one step,
        without tokens or segments, of which nothing says what is meant.
        """
        self.generation, self.is_loose = generation, is_loose
        self._segments = generation.segments
        self._tokens = {token.pos: token for token in generation.tokens}
        self.intent = _intent(generation)
        self.has_own_rule = self.intent is None and _says_mask(generation)

    def learn(self, step: StepRecord) -> None:
        """Take the tokens that a step chose, and the masks that are new in it."""
        for token in step.tokens:
            self._tokens[token.pos] = token
        for mask in step.masks:
            self._keep(mask)

    # -- masks -----------------------------------------------------------------------------------

    def mask(self, fingerprint: str | None) -> MaskRecord | None:
        """Return a mask met before, None for none and for one that is forgotten."""
        if fingerprint is None:
            return None
        known = self._masks.get(fingerprint)
        if known is None and self._find_mask is not None:
            known = self._find_mask(fingerprint)
            if known is not None:
                self._keep(known)
        return known

    def _keep(self, mask: MaskRecord) -> None:
        if mask.fingerprint in self._masks:
            return
        self._masks[mask.fingerprint] = mask
        self._mask_bytes += _size(mask)
        while self._mask_bytes > MASK_BYTES and len(self._masks) > 1:
            self._mask_bytes -= _size(self._masks.popitem(last=False)[1])

    # -- segments and words ----------------------------------------------------------------------

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments; the last one is open."""
        return self._segments

    @property
    def n_prompt(self) -> int:
        """Positions of the prompt: where the open last segment starts."""
        return self._segments[-1].start if self._segments else 0

    def token(self, pos: int) -> TokenRecord | None:
        """Return the token at a position, None where it is not known."""
        return self._tokens.get(pos)

    def segment_at(self, pos: int) -> Segment | None:
        """Return the segment of a position."""
        for index, segment in enumerate(self._segments):
            last = index == len(self._segments) - 1
            if segment.start <= pos and (last or pos < segment.stop):
                return segment
        return None

    def position(self, pos: int) -> str:
        """Return `position 14 "What"`, without the word where it is not known."""
        token = self._tokens.get(pos)
        word = printable((token.text or token.token) if token is not None else "")
        if len(word) > _WORD:
            word = word[: _WORD - 1] + "…"
        return f'position {pos} "{word}"' if word else f"position {pos}"

    def rows(self, positions: Positions) -> str:
        """Return `12 rows of paraphrase 2 and separator 2`, positions ascending."""
        labels = self._labels(positions)
        if len(labels) > 2:
            labels = [labels[0], f"{len(labels) - 1} other segments"]
        return counted(len(positions), "row") + (f" of {' and '.join(labels)}" if labels else "")

    def first(self, positions: Positions) -> str:
        """Return `first: position 14 "What"`, or without "first" for a single one."""
        return ("first: " if len(positions) > 1 else "") + self.position(int(positions[0]))

    def _labels(self, positions: Positions) -> list[str]:
        """Return the labels of the segments that hold some of the positions, in order."""
        last = len(self._segments) - 1
        out = []
        for index, segment in enumerate(self._segments):
            inside = positions >= segment.start
            if index < last:  # the last one is open
                inside &= positions < segment.stop
            if inside.any():
                out.append(printable(segment.label))
        return out


def _intent(generation: GenerationRecord) -> Intent | None:
    rule = masks.declared_rule(generation.declared)
    if rule is not None:
        return Intent(rule)
    if _says_mask(generation):
        return None
    if _count(generation.segments, SegmentKind.PARAPHRASE) < 2:
        return None
    return Intent(masks.preset("segment-isolation", generation.segments), assumed=True)


def _says_mask(generation: GenerationRecord) -> bool:
    return not {*generation.declared} <= {*pieces.KEYS}


def _count(segments: Iterable[Segment], kind: SegmentKind) -> int:
    return sum(segment.kind is kind for segment in segments)


def _size(mask: MaskRecord) -> int:
    arrays = (mask.cells, mask.averaged, mask.partial, mask.full, mask.ruled)
    return 512 + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
