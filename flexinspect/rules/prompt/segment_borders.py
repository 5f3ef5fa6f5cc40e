"""Judges the borders of executed masks by the declared segments, and says what is wrong.

A row that goes on with the segment of the row before sees one key more, itself. Every other row is
a border of the mask: a segment begins there, or sees nothing, or sees all. Masks without segments
(a causal one, a window, one that is open everywhere) have no borders, or one in many rows, and
nothing is concluded from the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_layers, plural, printable
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.prompt.prompt_facts import (
    MAX_SHIFT,
    PromptTokens,
    candidate_shifts,
    find_shift,
    is_growing,
    leading_lengths,
    token_lengths,
)
from flexinspect.rules.prompt.segment_findings import DRIFT, SEGMENTS_MERGED, SHIFTED

_LIBRARY_PREFIXES = ("transformers.", "flexinspect")
_MAX_NAMED_SEGMENTS = 3


@dataclass(frozen=True, slots=True)
class BorderFault:
    """What is wrong with the borders of some heads of a mask (see `fedmask.Compared`)."""

    id: str
    heads: tuple[int, ...]
    borders: Borders
    offsets: tuple[int, ...] = ()
    missing: tuple[Segment, ...] = ()


class BorderCheck:
    """Compares the borders of masks with the segments of one generation."""

    def __init__(self, context: RuleContext, prompt: PromptTokens) -> None:
        self._context, self._prompt = context, prompt
        self._paraphrases = prompt.paraphrases
        self.is_needed = bool(self._paraphrases)

    @cached_property
    def _declared_borders(self) -> Borders:
        """The borders that the declared rule has, or the one that is assumed."""
        intent = self._context.declared_mask
        return () if intent is None else spec_borders(intent.spec, self._context.n_prompt + 1)

    @cached_property
    def _span_shift(self) -> int | None:
        """By how many tokens the declared spans themselves are off."""
        shift = find_shift(self._prompt)
        return None if shift is None else shift.tokens

    @property
    def _severity(self) -> Severity:
        intent = self._context.declared_mask
        is_declared = intent is not None and not intent.assumed
        return Severity.ERROR if is_declared else Severity.WARNING

    def check_mask(self, mask: MaskRecord | None, head_borders: HeadBorders) -> BorderFault | None:
        """Return what is wrong with the borders of a mask, None when nothing is, or it is unclear.

        A mask whose every row begins anew (a window, all open) has no segments to compare.
        """
        if mask is None or mask.q_offset or len(head_borders.borders) > mask.q_len // 2:
            return None
        apart = [one for one in self._paraphrases if one.start < mask.q_len]
        found = compare_borders(
            head_borders.borders, self._context.segments, apart, leading_lengths(self._prompt)
        )
        offsets = found.offsets or self._find_declared_shift(head_borders.borders, mask.q_len)
        if found.misplaced or offsets:
            off = {*offsets}
            if not off or off == {-(self._span_shift or 0)}:
                return None
            kind = SHIFTED if len(off) == 1 else DRIFT
            return BorderFault(kind, head_borders.heads, head_borders.borders, offsets)
        missing = self._declared_missing(found.missing, apart)
        if not missing or not self._is_custom_mask(mask, head_borders.borders):
            return None
        return BorderFault(
            SEGMENTS_MERGED, head_borders.heads, head_borders.borders, missing=missing
        )

    def _find_declared_shift(self, borders: Borders, n_rows: int) -> tuple[int, ...]:
        """Return by how much all borders lie before those of a declared rule, empty if they do not.

        Such a rule says where a separator belongs, so even a border inside of one may be off.
        """
        intent = self._context.declared_mask
        if (
            intent is None
            or intent.assumed
            or len(borders) < 2
            or {*borders} <= {*self._declared_borders}
        ):
            return ()
        for n in candidate_shifts(self._prompt):
            if borders == tuple(b - n for b in self._declared_borders if 0 < b - n < n_rows):
                return (n,) * len(borders)
        return ()

    def _declared_missing(
        self, missing: Iterable[Segment], apart: Sequence[Segment]
    ) -> tuple[Segment, ...]:
        """Return the segments at whose beginning the declared rule has a border, too."""
        before = {later: earlier.stop for earlier, later in pairwise(apart)}
        return tuple(
            one
            for one in missing
            if any(before[one] <= b <= one.start for b in self._declared_borders)
        )

    def _is_custom_mask(self, mask: MaskRecord, borders: Borders) -> bool:
        """Say whether somebody made this mask to have borders, and it is no backend's own."""
        if mask.kind == "block":
            return not (mask.rule or "").startswith(_LIBRARY_PREFIXES)
        return len(borders) > 0

    # -- in words --------------------------------------------------------------------------------

    def make_finding(
        self, step: StepRecord, fault: BorderFault, calls: Sequence[CallRecord]
    ) -> Finding:
        """Return a verdict in words, for the layers of these calls."""
        which = sorted({call.layer for call in calls})
        where = format_layers(which, len({call.layer for call in step.calls}))
        if fault.heads:
            where += f" ({plural(len(fault.heads), 'head')}, first {fault.heads[0]})"
        say = {
            SHIFTED: self._describe_shift,
            DRIFT: self._describe_drift,
            SEGMENTS_MERGED: self._describe_merge,
        }[fault.id]
        sentence, positions = say(fault, where)
        return Finding(
            id=fault.id,
            severity=self._severity,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=which[0],
            head=fault.heads[0] if len(fault.heads) == 1 else None,
            positions=positions,
            evidence=self._evidence(fault, calls, which),
            layers=tuple(which) if len(which) > 1 else (),
            series=f"mask {fault.heads} {fault.offsets} {len(fault.missing)}",
        )

    def _evidence(
        self, fault: BorderFault, calls: Sequence[CallRecord], which: Sequence[int]
    ) -> dict[str, Any]:
        said: dict[str, Any] = {
            "mask": calls[0].mask,
            "borders": list(fault.borders),
            "declared": [[one.label, one.start, one.stop] for one in self._paraphrases],
            "layers": list(which),
            "heads": list(fault.heads) or "all",
        }
        if fault.offsets:
            said["shift"] = fault.offsets[0]
            said["offsets"] = list(fault.offsets)
        if fault.id == DRIFT:
            said["tokens alone and fed"] = [list(pair) for pair in token_lengths(self._prompt)]
        return said

    def _describe_shift(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        n = fault.offsets[0]
        side = "before" if n > 0 else "after"
        places, positions = self._describe_cuts(fault.borders, n)
        sentence = (
            f"In {where} the borders of the executed mask lie {plural(abs(n), 'token')} {side} "
            f"those declared{explain_shift(self._prompt, n)}: {places}."
        )
        return sentence + self._describe_assumption(), positions

    def _describe_cuts(self, borders: Borders, n: int) -> tuple[str, tuple[int, ...]]:
        """Return in words what is cut off from each segment, and the positions."""
        parts, positions = [], []
        for one in self._paraphrases:
            inside = [b for b in borders if one.start < b < one.stop]
            if not inside:
                continue
            lost = range(inside[0], one.stop) if n > 0 else range(one.start, inside[-1])
            end = "last" if n > 0 else "first"
            many = f"{end} token" if len(lost) == 1 else f"{end} {len(lost)} tokens"
            parts.append(f"the {many} of '{printable(one.label)}' ({self._describe_first(lost)})")
            positions += list(lost)
        if not parts:  # inside of separators
            there, here = (
                self._context.format_position(borders[0]),
                self._context.format_position(borders[0] + n),
            )
            return f"the first is at {there} instead of {here}", borders[:32]
        told = (
            parts
            if len(parts) <= _MAX_NAMED_SEGMENTS
            else [*parts[:_MAX_NAMED_SEGMENTS], f"{len(parts) - _MAX_NAMED_SEGMENTS} more"]
        )
        listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
        what = "what comes after" if n > 0 else "what comes before"
        is_one = len(positions) == 1
        return f"{listed} {'is' if is_one else 'are'} treated as {what}", tuple(positions[:32])

    def _describe_first(self, lost: range) -> str:
        word = self._context.format_position(lost[0])
        return word if len(lost) == 1 else f"from {word}"

    def _describe_drift(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        steps = ", ".join(map(str, fault.offsets))
        alone, fed = (sum(pair[n] for pair in token_lengths(self._prompt)) for n in (0, 1))
        summed = f" (encoded alone they have {alone} tokens, in the prompt {fed})"
        sentence = (
            f"In {where} the borders of the executed mask drift away from those declared: they lie "
            f"{steps} tokens before them, as if positions had been summed from pieces that were "
            f"encoded one by one{summed if alone != fed else ''}; the last is at "
            f"{self._context.format_position(fault.borders[-1])}."
        )
        return sentence + self._describe_assumption(), fault.borders[:32]

    def _describe_merge(self, fault: BorderFault, where: str) -> tuple[str, tuple[int, ...]]:
        starts = tuple(one.start for one in fault.missing)
        n, n_missing = len(self._paraphrases), len(starts)
        if n_missing == n - 1:
            what = f"is one piece in {where}, and {n} segments were declared"
        else:
            what = (
                f"has {n - n_missing} pieces where {n} segments were declared, in {where}: no "
                f"border before {' and '.join(_quote_segment_labels(fault.missing))}"
            )
        sentence = (
            f"The executed mask {what}; {self._context.format_position(starts[0])}, the first of "
            f"'{printable(fault.missing[0].label)}', sees the segment before it"
            f"{self._describe_eos()}."
        )
        return sentence + self._describe_assumption(), starts[:32]

    def _describe_eos(self) -> str:
        """Return what is known of an EOS between the segments."""
        fed, eos = self._prompt, self._prompt.tokenizer_facts.eos
        ids = fed.ids[
            max(self._paraphrases[0].start - fed.start, 0) : self._paraphrases[-1].start - fed.start
        ]
        if not ids or any(id_ in eos for id_ in ids):
            return ""
        if eos:
            return (
                f"; the ids between have no EOS ({', '.join(map(str, eos))}) to take borders from"
            )
        last = [self._context.token(one.stop - 1) for one in self._paraphrases[:-1]]
        if len({token.token_id for token in last if token is not None}) == len(last) > 1:
            return "; no id ends more than one of them, so there is no EOS to take borders from"
        return ""

    def _describe_assumption(self) -> str:
        """Return what is to be added where no mask was declared."""
        intent = self._context.declared_mask
        if intent is not None and not intent.assumed:
            return ""
        return " No mask was declared; segments are taken to be kept apart."


def _quote_segment_labels(segments: Sequence[Segment]) -> list[str]:
    names = [f"'{printable(one.label)}'" for one in segments[:_MAX_NAMED_SEGMENTS]]
    return (
        names
        if len(segments) <= _MAX_NAMED_SEGMENTS
        else [*names, f"{len(segments) - _MAX_NAMED_SEGMENTS} more"]
    )


def explain_shift(prompt: PromptTokens, n: int) -> str:
    """Return what a shift by n tokens usually comes from, "" when nothing explains it."""
    bos = int(prompt.has_bos)
    if n == bos == 1:
        return ", as if positions had been counted without the BOS"
    if n == -1 and not bos and prompt.tokenizer_facts.bos is not None:
        return ", as if a BOS had been counted that was not fed"
    if n and prompt.n_pads and n == prompt.n_pads:
        return ", as if positions had been counted without the padding"
    if n and prompt.n_pads and n == prompt.n_pads + bos:
        return ", as if positions had been counted without the padding and the BOS"
    return ""


OpenKeyCounts = npt.NDArray[np.intp]
"""Open keys per row, (rows,)."""

Borders = tuple[int, ...]
"""Positions at which the rows of a mask begin to see something else."""

MAX_BORDER_ROWS = 4096
"""Rows up to which the borders of a declared rule are worked out."""


@dataclass(frozen=True, slots=True)
class HeadBorders:
    """The borders of some heads of a mask, `heads` being empty where all share them."""

    heads: tuple[int, ...]
    borders: Borders


def find_borders(mask: MaskRecord) -> tuple[HeadBorders, ...] | None:
    """Return the borders of a mask of several rows, None where it has none to speak of.

    That is a mask whose cells are not known, a single row that is broadcast, and a window.
    """
    cells = mask.cells
    if cells is None or mask.kv_offset or cells.shape[1] != mask.q_len or mask.q_len < 2:
        return None
    if mask.kind.startswith("none"):
        return None
    if mask.averaged is not None:  # rows that were meant to be closed
        cells = cells & ~mask.averaged[..., None]
    by_head: dict[Borders, list[int]] = {}
    for head, rows in enumerate(cells):
        counts = np.count_nonzero(rows, axis=1)
        if _has_sliding_rows(rows, counts, mask.q_offset):
            return None
        by_head.setdefault(_find_row_borders(counts, mask.q_offset), []).append(head)
    if len(by_head) == 1:
        return (HeadBorders((), next(iter(by_head))),)
    return tuple(HeadBorders(tuple(heads), borders) for borders, heads in by_head.items())


def _has_sliding_rows(cells: BoolArray, counts: OpenKeyCounts, offset: int) -> bool:
    """Say whether a row has as many keys as the one before and sees it: a window, or all is open.

    Where a segment begins, the row before is not seen.
    """
    rows = np.flatnonzero((counts[1:] == counts[:-1]) & (counts[1:] > 1)) + 1
    before = rows + offset - 1
    return bool(cells[rows, np.minimum(before, cells.shape[1] - 1)].any())


def _find_row_borders(counts: OpenKeyCounts, offset: int) -> Borders:
    """Return where the number of open keys per row, (rows,), does not rise by one."""
    steps = np.diff(counts)
    begun = np.maximum.accumulate(counts)[:-1] > 0
    goes_on = (steps == 1) & ((counts[:-1] > 0) | ~begun)
    stays_empty = (counts[1:] == 0) & (counts[:-1] == 0)
    return tuple((np.flatnonzero(~(goes_on | stays_empty)) + 1 + offset).tolist())


def spec_borders(spec: MaskSpec, n_rows: int) -> Borders:
    """Return the borders of a declared rule over the first rows."""
    counts = np.count_nonzero(spec.dense(min(n_rows, MAX_BORDER_ROWS)), axis=1)
    return _find_row_borders(counts, 0)


@dataclass(frozen=True, slots=True)
class BorderComparison:
    """What borders are against the declared segments.

    `offsets` says by how many tokens the borders lie before those declared (negative: after), all
    the same or growing; it is empty when they do not correspond. `missing` are the segments, of
    those that begin inside the mask's rows, at whose beginning there is no border.
    """

    offsets: tuple[int, ...] = ()
    misplaced: tuple[int, ...] = ()
    missing: tuple[Segment, ...] = field(default=())


def compare_borders(
    borders: Borders,
    segments: Sequence[Segment],
    apart: Sequence[Segment],
    extra_shifts: Iterable[int],
) -> BorderComparison:
    """Compare the borders of a mask with those of all segments, of which `apart` are kept apart.

    A border between two segments, in a separator, or at its ends, is in its place. `also` are
    numbers of tokens to try beside the near ones.
    """
    cut = tuple(b for b in borders if any(one.start < b < one.stop for one in apart))
    if not cut:
        return BorderComparison(missing=tuple(_find_missing_borders(borders, apart, 0)))
    tries = sorted(
        {*range(-MAX_SHIFT, MAX_SHIFT + 1), *extra_shifts} - {0}, key=lambda n: (abs(n), n < 0)
    )
    places = {edge for one in segments for edge in (one.start, one.stop)}
    for n in tries:
        fits = all(b + n in places for b in borders) and _is_regular_border_set(
            {b + n for b in borders}, apart
        )
        if (
            fits
            and not _find_missing_borders(borders, apart, n)
            and (len(borders) > 1 or abs(n) <= 4)
        ):
            return BorderComparison((n,) * len(borders), cut)
    return BorderComparison(_find_drift(borders, apart), cut)


def _find_missing_borders(borders: Borders, apart: Sequence[Segment], n: int) -> list[Segment]:
    """Return the segments with no border between their start and the stop of the one before."""
    return [
        later
        for earlier, later in pairwise(apart)
        if not any(earlier.stop - n <= b <= later.start - n for b in borders)
    ]


def _is_regular_border_set(borders: set[int], apart: Sequence[Segment]) -> bool:
    """Say whether gaps are all treated alike: before, after, or on both sides there is a border."""
    sides = {
        (earlier.stop in borders, later.start in borders)
        for earlier, later in pairwise(apart)
        if earlier.stop < later.start
    }
    return len(sides) < 2


def _find_drift(borders: Borders, apart: Sequence[Segment]) -> tuple[int, ...]:
    """Return growing offsets when the borders are those declared, in order, off by a few more."""
    starts = [one.start for one in apart[1:]]
    both = sorted({edge for one in apart for edge in (one.start, one.stop)} - {apart[0].start})
    for places in (starts, [*starts, apart[-1].stop], both):
        if len(places) != len(borders) or len(places) < 2:
            continue
        offsets = [place - b for place, b in zip(places, borders, strict=True)]
        n_off = sum(offset != 0 for offset in offsets)
        if is_growing(offsets) and n_off > 1 and max(map(abs, offsets)) <= MAX_SHIFT:
            return tuple(offsets)
    return ()
