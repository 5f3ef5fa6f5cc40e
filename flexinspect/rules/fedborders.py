"""Judges the borders of executed masks by the declared segments, and says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from flexinspect.findings import Finding, Severity
from flexinspect.prompts import Segment
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.fedfacts import Fed
from flexinspect.rules.fedkinds import DRIFT, MERGED, SHIFTED
from flexinspect.rules.fedmask import Borders, HeadBorders, borders_of_rule, compare
from flexinspect.rules.fedshift import find_shift, leads, reach_of
from flexinspect.rules.fedwords import lengths
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, layers, printable

_OURS = ("transformers.", "flexinspect")
_MOST = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the borders of some heads of a mask (see `fedmask.Compared`)."""

    id: str
    heads: tuple[int, ...]
    borders: Borders
    offsets: tuple[int, ...] = ()
    missing: tuple[Segment, ...] = ()


class BorderCheck:
    """Compares the borders of masks with the segments of one generation."""

    def __init__(self, scene: Scene, fed: Fed) -> None:
        self._scene, self._fed = scene, fed
        self._apart = fed.paraphrases
        self.is_needed = bool(self._apart)

    @cached_property
    def _meant(self) -> Borders:
        """The borders that the declared rule has, or the one that is assumed."""
        intent = self._scene.intent
        return () if intent is None else borders_of_rule(intent.rule, self._scene.n_prompt + 1)

    @cached_property
    def _spans_off_by(self) -> int | None:
        """By how many tokens the declared spans themselves are off."""
        shift = find_shift(self._fed)
        return None if shift is None else shift.n

    @property
    def _severity(self) -> Severity:
        intent = self._scene.intent
        is_declared = intent is not None and not intent.assumed
        return Severity.ERROR if is_declared else Severity.WARNING

    def judge(self, mask: MaskRecord | None, part: HeadBorders) -> Verdict | None:
        """Return what is wrong with the borders of a mask, None when nothing is, or it is unclear.

        A mask whose every row begins anew (a window, all open) has no segments to compare.
        """
        if mask is None or mask.q_offset or len(part.borders) > mask.q_len // 2:
            return None
        apart = [one for one in self._apart if one.start < mask.q_len]
        found = compare(part.borders, self._scene.segments, apart, leads(self._fed))
        offsets = found.offsets or self._off_by(part.borders, mask.q_len)
        if found.cut or offsets:
            off = {*offsets}
            if not off or off == {-(self._spans_off_by or 0)}:
                return None
            kind = SHIFTED if len(off) == 1 else DRIFT
            return Verdict(kind, part.heads, part.borders, offsets)
        missing = self._really_missing(found.missing, apart)
        if not missing or not self._is_made(mask, part.borders):
            return None
        return Verdict(MERGED, part.heads, part.borders, missing=missing)

    def _off_by(self, borders: Borders, n_rows: int) -> tuple[int, ...]:
        """Return by how much all borders lie before those of a declared rule, empty if they do not.

        Such a rule says where a separator belongs, so even a border inside of one may be off.
        """
        intent = self._scene.intent
        if intent is None or intent.assumed or len(borders) < 2 or {*borders} <= {*self._meant}:
            return ()
        for n in reach_of(self._fed):
            if borders == tuple(b - n for b in self._meant if 0 < b - n < n_rows):
                return (n,) * len(borders)
        return ()

    def _really_missing(
        self, missing: Iterable[Segment], apart: Sequence[Segment]
    ) -> tuple[Segment, ...]:
        """Return the segments at whose beginning the declared rule has a border, too."""
        before = {later: earlier.stop for earlier, later in pairwise(apart)}
        return tuple(
            one for one in missing if any(before[one] <= b <= one.start for b in self._meant)
        )

    def _is_made(self, mask: MaskRecord, borders: Borders) -> bool:
        """Say whether somebody made this mask to have borders, and it is no backend's own."""
        if mask.kind == "block":
            return not (mask.rule or "").startswith(_OURS)
        return len(borders) > 0

    # -- in words --------------------------------------------------------------------------------

    def finding(self, step: StepRecord, verdict: Verdict, calls: Sequence[CallRecord]) -> Finding:
        """Return a verdict in words, for the layers of these calls."""
        which = sorted({call.layer for call in calls})
        where = layers(which, len({call.layer for call in step.calls}))
        if verdict.heads:
            where += f" ({counted(len(verdict.heads), 'head')}, first {verdict.heads[0]})"
        say = {SHIFTED: self._shifted, DRIFT: self._drifted, MERGED: self._merged}[verdict.id]
        sentence, positions = say(verdict, where)
        return Finding(
            id=verdict.id,
            severity=self._severity,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=which[0],
            head=verdict.heads[0] if len(verdict.heads) == 1 else None,
            positions=positions,
            evidence=self._evidence(verdict, calls, which),
            layers=tuple(which) if len(which) > 1 else (),
            series=f"mask {verdict.heads} {verdict.offsets} {len(verdict.missing)}",
        )

    def _evidence(
        self, verdict: Verdict, calls: Sequence[CallRecord], which: Sequence[int]
    ) -> dict[str, Any]:
        said: dict[str, Any] = {
            "mask": calls[0].mask,
            "borders": list(verdict.borders),
            "declared": [[one.label, one.start, one.stop] for one in self._apart],
            "layers": list(which),
            "heads": list(verdict.heads) or "all",
        }
        if verdict.offsets:
            said["shift"] = verdict.offsets[0]
            said["offsets"] = list(verdict.offsets)
        if verdict.id == DRIFT:
            said["tokens alone and fed"] = [list(pair) for pair in lengths(self._fed)]
        return said

    def _shifted(self, verdict: Verdict, where: str) -> tuple[str, tuple[int, ...]]:
        n = verdict.offsets[0]
        side = "before" if n > 0 else "after"
        places, positions = self._cut_places(verdict.borders, n)
        sentence = (
            f"In {where} the borders of the executed mask lie {counted(abs(n), 'token')} {side} "
            f"those declared{as_if(self._fed, n)}: {places}."
        )
        return sentence + self._assumed(), positions

    def _cut_places(self, borders: Borders, n: int) -> tuple[str, tuple[int, ...]]:
        """Return in words what is cut off from each segment, and the positions."""
        parts, positions = [], []
        for one in self._apart:
            inside = [b for b in borders if one.start < b < one.stop]
            if not inside:
                continue
            lost = range(inside[0], one.stop) if n > 0 else range(one.start, inside[-1])
            end = "last" if n > 0 else "first"
            many = f"{end} token" if len(lost) == 1 else f"{end} {len(lost)} tokens"
            parts.append(f"the {many} of '{printable(one.label)}' ({self._first(lost)})")
            positions += list(lost)
        if not parts:  # inside of separators
            there, here = self._scene.position(borders[0]), self._scene.position(borders[0] + n)
            return f"the first is at {there} instead of {here}", borders[:32]
        told = parts if len(parts) <= _MOST else [*parts[:_MOST], f"{len(parts) - _MOST} more"]
        listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
        what = "what comes after" if n > 0 else "what comes before"
        is_one = len(positions) == 1
        return f"{listed} {'is' if is_one else 'are'} treated as {what}", tuple(positions[:32])

    def _first(self, lost: range) -> str:
        word = self._scene.position(lost[0])
        return word if len(lost) == 1 else f"from {word}"

    def _drifted(self, verdict: Verdict, where: str) -> tuple[str, tuple[int, ...]]:
        steps = ", ".join(map(str, verdict.offsets))
        alone, fed = (sum(pair[n] for pair in lengths(self._fed)) for n in (0, 1))
        summed = f" (encoded alone they have {alone} tokens, in the prompt {fed})"
        sentence = (
            f"In {where} the borders of the executed mask drift away from those declared: they lie "
            f"{steps} tokens before them, as if positions had been summed from pieces that were "
            f"encoded one by one{summed if alone != fed else ''}; the last is at "
            f"{self._scene.position(verdict.borders[-1])}."
        )
        return sentence + self._assumed(), verdict.borders[:32]

    def _merged(self, verdict: Verdict, where: str) -> tuple[str, tuple[int, ...]]:
        starts = tuple(one.start for one in verdict.missing)
        n, n_missing = len(self._apart), len(starts)
        if n_missing == n - 1:
            what = f"is one piece in {where}, and {n} segments were declared"
        else:
            what = (
                f"has {n - n_missing} pieces where {n} segments were declared, in {where}: no "
                f"border before {' and '.join(_names(verdict.missing))}"
            )
        sentence = (
            f"The executed mask {what}; {self._scene.position(starts[0])}, the first of "
            f"'{printable(verdict.missing[0].label)}', sees the segment before it"
            f"{self._ends_of_text()}."
        )
        return sentence + self._assumed(), starts[:32]

    def _ends_of_text(self) -> str:
        """Return what is known of an EOS between the segments."""
        fed, eos = self._fed, self._fed.words.eos
        ids = fed.ids[max(self._apart[0].start - fed.start, 0) : self._apart[-1].start - fed.start]
        if not ids or any(id_ in eos for id_ in ids):
            return ""
        if eos:
            return (
                f"; the ids between have no EOS ({', '.join(map(str, eos))}) to take borders from"
            )
        last = [self._scene.token(one.stop - 1) for one in self._apart[:-1]]
        if len({token.token_id for token in last if token is not None}) == len(last) > 1:
            return "; no id ends more than one of them, so there is no EOS to take borders from"
        return ""

    def _assumed(self) -> str:
        """Return what is to be added where no mask was declared."""
        intent = self._scene.intent
        if intent is not None and not intent.assumed:
            return ""
        return " No mask was declared; segments are taken to be kept apart."


def _names(segments: Sequence[Segment]) -> list[str]:
    names = [f"'{printable(one.label)}'" for one in segments[:_MOST]]
    return names if len(segments) <= _MOST else [*names, f"{len(segments) - _MOST} more"]


def as_if(fed: Fed, n: int) -> str:
    """Return what a shift by n tokens usually comes from, "" when nothing explains it."""
    bos = int(fed.has_bos)
    if n == bos == 1:
        return ", as if positions had been counted without the BOS"
    if n == -1 and not bos and fed.words.bos is not None:
        return ", as if a BOS had been counted that was not fed"
    if n and fed.n_pads and n == fed.n_pads:
        return ", as if positions had been counted without the padding"
    if n and fed.n_pads and n == fed.n_pads + bos:
        return ", as if positions had been counted without the padding and the BOS"
    return ""
