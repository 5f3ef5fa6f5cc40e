"""Compares the segment borders of executed masks with the declared segments.

A row that continues the segment of the previous row attends to one more key, its own. Every other
row is a border of the mask: a segment begins there, or the row attends to no key, or to all keys.
Masks without segments (causal, sliding-window, fully open) have no borders, or one in many rows;
the latter are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import is_or_are, join_labels, plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import DeclaredSegment, Segment
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Rule
from flexinspect.rules.masks.mask_views import layers_of
from flexinspect.rules.prompt import prompt_facts, span_shift
from flexinspect.rules.prompt.prompt_facts import PromptTokens

_LIBRARY_PREFIXES = ("transformers.", "flexinspect")
MAX_NAMES = 3  # labels or places that a sentence lists; it counts the others
MAX_BORDER_ROWS = 4096  # rows up to which the borders of a declared mask are computed

Borders = tuple[int, ...]  # positions of the rows at which another set of keys begins
HeadBorders = tuple[tuple[int, ...], Borders]  # by heads of a mask; () if all heads share them


class BorderFault(NamedTuple):
    """A fault in the borders of some heads of a mask.

    `offsets` are the distances from the declared borders; `missing` are segments without a border.
    """

    id: str
    heads: tuple[int, ...]
    borders: Borders
    offsets: tuple[int, ...] = ()
    missing: tuple[Segment, ...] = ()


class BorderCheck:
    """Compares the borders of masks with the segments of one generation."""

    def __init__(self, rule: Rule, prompt: PromptTokens) -> None:
        self._rule, self._context, self._prompt = rule, rule.context, prompt
        self._paraphrases = prompt.paraphrases
        self._has_declared_mask = self._context.declared_spec is not None

    @cached_property
    def _declared_borders(self) -> Borders:
        """The borders of the declared mask, or of the one that is assumed."""
        declared = self._context.declared_mask
        if declared is None:
            return ()
        cells = declared.spec.dense(min(self._context.n_prompt + 1, MAX_BORDER_ROWS))
        return _find_row_borders(np.count_nonzero(cells, axis=1), 0)

    def check_mask(self, mask: MaskRecord | None, head_borders: HeadBorders) -> BorderFault | None:
        """The fault in the borders of a mask; None if there is none, or if it is unclear."""
        # A mask with a border in most rows (sliding window, fully open) has no segments to compare.
        heads, borders = head_borders
        if mask is None or mask.q_offset or len(borders) > mask.q_len // 2:
            return None
        apart = [one for one in self._paraphrases if one.start < mask.q_len]
        misplaced = any(s.start < b < s.stop for b in borders for s in apart)
        offsets: tuple[int, ...] = ()
        if misplaced:
            shifts = prompt_facts.candidate_shifts(self._prompt)
            offsets = _find_offsets(borders, self._context.segments, apart, shifts)
        offsets = offsets or self._find_declared_shift(borders, mask.q_len)
        if misplaced or offsets:
            shift = span_shift.find_shift(self._prompt)  # of the declared spans themselves
            if not offsets or {*offsets} == {0 if shift is None else -(shift.tokens or 0)}:
                return None
            kind = "segments.shifted" if len({*offsets}) == 1 else "segments.drift"
            return BorderFault(kind, heads, borders, offsets)
        missing = tuple(
            later
            for earlier, later in _without_border(borders, apart)
            if any(earlier.stop <= b <= later.start for b in self._declared_borders)
        )
        is_custom = len(borders) > 0  # whether user code made this mask, and not a library
        if mask.kind == "block":
            is_custom = not (mask.mask_mod or "").startswith(_LIBRARY_PREFIXES)
        if not missing or not is_custom:
            return None
        return BorderFault("segments.merged", heads, borders, missing=missing)

    def _find_declared_shift(self, borders: Borders, n_rows: int) -> tuple[int, ...]:
        """By how much all borders precede those of the declared mask, empty if they do not."""
        # A declared mask defines where a separator belongs, so even a border inside one may be off.
        declared = self._declared_borders
        if not self._has_declared_mask or len(borders) < 2 or {*borders} <= {*declared}:
            return ()
        for n in prompt_facts.candidate_shifts(self._prompt):
            if borders == tuple(b - n for b in declared if 0 < b - n < n_rows):
                return (n,) * len(borders)
        return ()

    def make_finding(
        self, step: StepRecord, fault: BorderFault, calls: Sequence[CallRecord]
    ) -> Finding:
        """The finding about a fault, for the layers of these calls."""
        layers = layers_of(calls)
        where = format_step_layers(layers, step)
        if fault.heads:
            where += f" ({plural(len(fault.heads), 'head')}, first {fault.heads[0]})"
        evidence: dict[str, Any] = {"mask": calls[0].mask, "borders": list(fault.borders)}
        evidence["declared"] = declared_evidence(self._paraphrases)
        evidence |= {"layers": list(layers), "heads": list(fault.heads) or "all"}
        if fault.offsets:
            evidence |= {"shift": fault.offsets[0], "offsets": list(fault.offsets)}
        if fault.id == "segments.shifted":
            sentence, positions = self._describe_shift(fault, where)
        elif fault.id == "segments.drift":
            sentence, positions = self._describe_drift(fault, where)
            evidence["tokens alone and in the prompt"] = list(map(list, self._prompt.token_lengths))
        else:
            sentence, positions = self._describe_merge(fault, where)
        severity = Severity.ERROR
        if not self._has_declared_mask:
            severity = Severity.WARNING
            sentence += " No mask was declared; segments are assumed to be isolated."
        options: dict[str, Any] = {"severity": severity, "layers": layers, "positions": positions}
        options["head"] = fault.heads[0] if len(fault.heads) == 1 else None
        options["series"] = f"mask {fault.heads} {fault.offsets} {len(fault.missing)}"
        return self._rule.finding(step, fault.id, sentence, evidence=evidence, **options)

    def _describe_shift(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        """Describe the tokens that are cut off from each segment; also their positions."""
        n, format_position = fault.offsets[0], self._context.format_position
        places, positions = [], list[int]()
        for segment in self._paraphrases:
            inside = [b for b in fault.borders if segment.start < b < segment.stop]
            if not inside:
                continue
            lost = range(inside[0], segment.stop) if n > 0 else range(segment.start, inside[-1])
            end, place = "last" if n > 0 else "first", format_position(lost[0])
            tokens = f"{end} token" if len(lost) == 1 else f"{end} {len(lost)} tokens"
            place = place if len(lost) == 1 else f"from {place}"
            places.append(f"the {tokens} of '{printable(segment.label)}' ({place})")
            positions += lost
        if places:
            what = (
                f"{join_labels(limit_names(places))} {is_or_are(len(positions))} counted as part "
                f"of the {'next' if n > 0 else 'previous'} segment"
            )
        else:  # inside separators
            positions, first = list(fault.borders), fault.borders[0]
            moved = format_position(first + n)
            what = f"the first is at {format_position(first)} instead of {moved}"
        sentence = (
            f"The borders of the executed mask are {plural(abs(n), 'token')} "
            f"{describe_direction(n)}{explain_shift(self._prompt, n)}: in {where} {what}."
        )
        return sentence, tuple(positions)

    def _describe_drift(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        steps = ", ".join(map(str, fault.offsets))
        alone, joined = (sum(pair[n] for pair in self._prompt.token_lengths) for n in (0, 1))
        summed = f" (encoded alone they have {alone} tokens, in the prompt {joined})"
        sentence = (
            f"In {where} the borders of the executed mask drift away from the declared ones: they "
            f"are {steps} tokens before them, as if positions had been summed from pieces encoded "
            f"one by one{summed if alone != joined else ''}; the last is at "
            f"{self._context.format_position(fault.borders[-1])}."
        )
        return sentence, fault.borders

    def _describe_merge(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        starts = tuple(segment.start for segment in fault.missing)
        n, n_missing = len(self._paraphrases), len(starts)
        if n_missing == n - 1:
            what = f"is one block in {where}, but {n} segments were declared"
        else:
            labels = limit_names([f"'{printable(segment.label)}'" for segment in fault.missing])
            what = (
                f"has {n - n_missing} blocks in {where}, but {n} segments were declared: there is "
                f"no border before {' and '.join(labels)}"
            )
        sentence = (
            f"The executed mask {what}; {self._context.format_position(starts[0])}, the first "
            f"token of '{printable(fault.missing[0].label)}', attends to the previous "
            f"segment{self._describe_eos()}."
        )
        return sentence, starts

    def _describe_eos(self) -> str:
        """Whether an EOS separates the segments, where that explains the missing borders."""
        prompt, eos = self._prompt, self._prompt.tokenizer.eos
        first, last = self._paraphrases[0].start, self._paraphrases[-1].start
        ids = prompt.ids[max(first - prompt.start, 0) : last - prompt.start]
        if not ids or any(id_ in eos for id_ in ids):
            return ""
        if eos:
            return f"; there is no EOS ({', '.join(map(str, eos))}) between them"
        ends = [self._context.token(segment.stop - 1) for segment in self._paraphrases[:-1]]
        if len({token.token_id for token in ends if token is not None}) == len(ends) > 1:
            return "; they all end with different ids, so no EOS separates them"
        return ""


def declared_evidence(spans: Iterable[Segment | DeclaredSegment]) -> list[dict[str, Any]]:
    """Return declared spans with the names that a declaration has for their positions."""
    return [{"label": one.label, "start": one.start, "stop": one.stop} for one in spans]


def limit_names(names: Sequence[str]) -> list[str]:
    """The first names, and how many more there are."""
    if len(names) <= MAX_NAMES:
        return [*names]
    return [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


def describe_direction(n: int) -> str:
    """Return `early` for borders that are n > 0 tokens before where they should be, or `late`."""
    return "early" if n > 0 else "late"


def explain_shift(prompt: PromptTokens, n: int) -> str:
    """The usual cause of a shift by n tokens, as the end of a clause; "" if it is not known."""
    bos, n_pads = int(prompt.has_bos), prompt.n_pads
    if n == -1 and not bos and prompt.tokenizer.bos is not None:
        return ", as if a BOS had been counted that is not in the prompt"
    causes = {n_pads + bos: "the padding and the BOS", n_pads: "the padding"} if n_pads else {}
    omitted = "the BOS" if n == bos == 1 else causes.get(n)
    return f", as if counted without {omitted}" if omitted else ""


def find_borders(mask: MaskRecord | None) -> tuple[HeadBorders, ...]:
    """The borders of a mask of several rows, by heads; empty if they are not defined."""
    # They are not for a mask whose cells are unknown, a single broadcast row, and a sliding window.
    if mask is None or mask.cells is None or mask.kv_offset or mask.kind.startswith("none"):
        return ()
    cells = mask.cells
    if cells.shape[1] != mask.q_len or mask.q_len < 2:
        return ()
    if mask.uniform_rows is not None:  # rows without any open key, averaged by eager attention
        cells = cells & ~mask.uniform_rows[..., None]
    by_head: dict[Borders, list[int]] = {}
    for head, rows in enumerate(cells):
        counts = np.count_nonzero(rows, axis=1)
        # In a sliding window and in a fully open mask, rows attend to the previous row and to as
        # many keys. Where a segment begins, the row does not attend to the previous one.
        same = np.flatnonzero((counts[1:] == counts[:-1]) & (counts[1:] > 1)) + 1
        if rows[same, np.minimum(same + mask.q_offset - 1, rows.shape[1] - 1)].any():
            return ()
        by_head.setdefault(_find_row_borders(counts, mask.q_offset), []).append(head)
    if len(by_head) == 1:
        return (((), next(iter(by_head))),)
    return tuple((tuple(heads), borders) for borders, heads in by_head.items())


def _find_row_borders(counts: npt.NDArray[np.intp], offset: int) -> Borders:
    """Positions at which the number of open keys per row, (rows,), does not rise by one."""
    steps = np.diff(counts)
    has_begun = np.maximum.accumulate(counts)[:-1] > 0
    continues = (steps == 1) & ((counts[:-1] > 0) | ~has_begun)
    stays_empty = (counts[1:] == 0) & (counts[:-1] == 0)
    return tuple((np.flatnonzero(~(continues | stays_empty)) + 1 + offset).tolist())


def _find_offsets(
    borders: Borders, segments: Sequence[Segment], apart: Sequence[Segment], shifts: Iterable[int]
) -> tuple[int, ...]:
    """By how many tokens borders precede the declared ones, empty if they do not correspond."""
    # They follow them where a number is negative. All are equal, one of the `shifts`, or growing.
    # The segments `apart` are isolated; a border inside a separator, or at one of its ends, is
    # correct.
    edges = {edge for segment in segments for edge in (segment.start, segment.stop)}
    for n in shifts:
        shifted = {b + n for b in borders}
        # All gaps between segments must have their borders on the same side or sides.
        sides = {
            (a.stop in shifted, b.start in shifted) for a, b in pairwise(apart) if a.stop < b.start
        }
        if (
            shifted <= edges
            and len(sides) < 2
            and not _without_border(tuple(shifted), apart)
            and (len(borders) > 1 or abs(n) <= 4)
        ):
            return (n,) * len(borders)
    return _find_drift(borders, apart)


def _without_border(borders: Borders, apart: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """The segments without a border between them, each with the one after it."""
    return [
        (earlier, later)
        for earlier, later in pairwise(apart)
        if not any(earlier.stop <= b <= later.start for b in borders)
    ]


def _find_drift(borders: Borders, apart: Sequence[Segment]) -> tuple[int, ...]:
    """Growing offsets between the borders and the declared ones, empty if there are none."""
    starts = [segment.start for segment in apart[1:]]
    edges = {edge for segment in apart for edge in (segment.start, segment.stop)}
    for declared in (starts, [*starts, apart[-1].stop], sorted(edges - {apart[0].start})):
        if len(declared) != len(borders) or len(declared) < 2:
            continue
        offsets = [edge - b for edge, b in zip(declared, borders, strict=True)]
        n_off = sum(offset != 0 for offset in offsets)
        is_near = max(map(abs, offsets)) <= prompt_facts.MAX_SHIFT
        if span_shift.is_growing(offsets) and n_off > 1 and is_near:
            return tuple(offsets)
    return ()
