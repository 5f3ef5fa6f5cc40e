"""Verification of a mask cell by cell: what a paraphrase ensemble requires, and what was declared.

The checks need numpy alone and trust nothing that a mask says about itself: every cell is
evaluated, in bands and in bounded memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.core.errors import MaskError
from flexinspect.core.text import MAX_LISTED_POSITIONS, did_you_mean, format_ranges
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.census import (
    BAND_ROWS,
    Census,
    Probe,
    Report,
    full_edges,
    part_of,
    take_census,
    tiles,
)
from flexinspect.masks.known_masks import ArrayMask, NegatedMask, RuleMask, causal
from flexinspect.masks.mask_presets import BoolArray, IntArray, Segments
from flexinspect.masks.picture_text import Places
from flexinspect.records.prompt import SegmentKind, generated_start

CHECKS = ("causal", "isolation", "fusion", "rows", "keys", "declared")
"""No key after its row; no attention between paraphrases while they are encoded; generated tokens
attend to all keys before them; no row without a key; no key without a row; equality with the
declared mask."""


class FusionRow(Struct, frozen=True):
    """How many of the `expected` keys up to its own a generated token attends to."""

    position: int
    attended: int
    expected: int


class HeadVerification(Struct, frozen=True):
    """What the checks found in the mask of one head.

    `causal`, `isolation`, `lost` and `leaked` are cells, each with the first one (row, key).
    `empty_rows` and `unseen_keys` are positions, `fusion` has a row per generated token. `lost` and
    `leaked` are None without a declared mask.
    """

    head: int
    causal: Probe
    isolation: Probe
    fusion: tuple[FusionRow, ...]
    empty_rows: npt.NDArray[np.intp]
    unseen_keys: npt.NDArray[np.intp]
    lost: Probe | None = None
    leaked: Probe | None = None

    @property
    def unfused(self) -> tuple[FusionRow, ...]:
        """The generated tokens that do not attend to all keys up to their own."""
        return tuple(row for row in self.fusion if row.attended < row.expected)

    def violations(self) -> dict[str, int]:
        """Return the number of violations of each check, in the order of `CHECKS`."""
        declared = sum(probe.count for probe in (self.lost, self.leaked) if probe is not None)
        probes = self.causal.count, self.isolation.count, len(self.unfused)
        counts = (*probes, len(self.empty_rows), len(self.unseen_keys), declared)
        return dict(zip(CHECKS, counts, strict=True))


class Verification(Struct, frozen=True):
    """The result of the `checks` of a mask, per head."""

    name: str
    n_rows: int
    n_keys: int
    checks: tuple[str, ...]
    heads: tuple[HeadVerification, ...]
    declared: str | None = None

    def count(self, check: str) -> int:
        """Return the number of violations of a check over all heads."""
        return sum(head.violations()[check] for head in self.heads)

    @property
    def failed(self) -> tuple[str, ...]:
        """The checks with a violation."""
        return tuple(check for check in self.checks if self.count(check))

    @property
    def passed(self) -> bool:
        """Whether no check has a violation."""
        return not self.failed

    def lines(self, places: Places) -> list[str]:
        """Return the result in words, each violation with its first place.

        Checks of the notebook are always there, others only if they fail or were asked for.
        """
        lines: list[str] = []
        for check in self.checks:
            lines += _LINES[check](self, places)
        label = places.labels
        verdict = label("verify_passed")
        if self.failed:
            verdict = label("verify_failed", count=len(self.failed))
        return [*lines, verdict]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data: counts, first places and positions."""
        checks = {
            check: {"violations": self.count(check), "passed": not self.count(check)}
            for check in self.checks
        }
        return {
            "mask": self.name,
            "rows": self.n_rows,
            "keys": self.n_keys,
            "declared": self.declared,
            "passed": self.passed,
            "checks": checks,
            "heads": [_head_json(head) for head in self.heads],
        }


def verify_mask(
    mask: CellMask | BoolArray,
    segments: Segments = (),
    *,
    n_rows: int | None = None,
    n_keys: int | None = None,
    declared: CellMask | None = None,
    checks: Collection[str] = CHECKS,
    report: Report | None = None,
    threads: int | None = None,
) -> Verification:
    """Evaluate every cell of a mask, and return what the checks of `CHECKS` found.

    `mask` is a mask, or its cells as bool (rows, keys) or (heads, rows, keys). The size is that of
    the cells, else the length of the segments, unless `n_rows` or `n_keys` is given. `declared` is
    the mask that it must equal. Checks that do not apply (no segments, no declared mask) pass.

    Raises `MaskError` for an unknown check, an array that is no mask, and without a size.
    """
    if isinstance(mask, np.ndarray):
        if mask.ndim not in (2, 3) or mask.dtype != np.bool_ or not mask.size:
            what = f"An array of {mask.dtype} with the shape {mask.shape} is not a mask."
            raise MaskError(what, hint="Pass bool (rows, keys) or (heads, rows, keys).")
        cells = mask[None] if mask.ndim == 2 else mask
        n_rows, n_keys = n_rows or cells.shape[1], n_keys or cells.shape[2]
        mask = ArrayMask("mask", cells)
    stop = segments[-1].stop if segments else 0
    n_rows, n_keys = n_rows or stop, n_keys or stop
    if unknown := [check for check in checks if check not in CHECKS]:
        hint = did_you_mean(unknown[0], CHECKS, f"The checks are {', '.join(CHECKS)}.")
        raise MaskError(f"There is no check '{unknown[0]}'.", hint=hint)
    if not n_rows or not n_keys:
        raise MaskError("The size of the mask is not known.", hint="Pass segments or a size.")
    chosen = tuple(check for check in CHECKS if check in checks)
    verifier = _Verifier(mask, segments, n_rows, n_keys, declared, chosen, report, threads)
    heads = tuple(
        map(verifier.verify, range(max(mask.n_heads, declared.n_heads if declared else 1)))
    )
    name = declared.name if declared is not None and "declared" in chosen else None
    return Verification(mask.name, n_rows, n_keys, chosen, heads, name)


def other_segments(segments: Segments) -> RuleMask:
    """Return the cells between different paraphrases, with their separators, as a mask."""
    owners = [s.owner if segments[s.owner].kind is SegmentKind.PARAPHRASE else -1 for s in segments]
    starts, numbers = np.array([s.start for s in segments] or [0]), np.array(owners or [-1])

    def rule(q: IntArray, kv: IntArray) -> BoolArray:
        row, key = (
            numbers[np.searchsorted(starts, at, side="right") - 1].astype(np.int32)
            for at in (q, kv)
        )
        cells: BoolArray = row != key
        cells &= row >= 0
        cells &= key >= 0
        return cells

    return RuleMask("other segments", rule)


class _Verifier(Struct, frozen=True):
    """Runs the checks of one mask."""

    mask: CellMask
    segments: Segments
    n_rows: int
    n_keys: int
    declared: CellMask | None
    checks: tuple[str, ...]
    report: Report | None
    threads: int | None

    def verify(self, head: int) -> HeadVerification:
        """Return what the checks find in the mask of a head."""
        probes: dict[str, CellMask] = {}
        if "causal" in self.checks:
            probes["causal"] = NegatedMask(causal(()))
        if "isolation" in self.checks and self.segments:
            probes["isolation"] = other_segments(self.segments)
        declared = self.declared if "declared" in self.checks else None
        if declared is not None:
            probes["leaked"] = NegatedMask(declared)
        census = self._census(self.mask, probes, head, 0)
        found = dict(zip(probes, census.probes, strict=True))
        if declared is not None:
            own = {"lost": NegatedMask(self.mask)}
            found["lost"] = self._census(declared, own, head, 1).probes[0]
        rows, keys = np.flatnonzero(~census.row_any), np.flatnonzero(census.key_counts == 0)
        return HeadVerification(
            head,
            found.get("causal", Probe()),
            found.get("isolation", Probe()),
            tuple(self._fusion(head)) if "fusion" in self.checks else (),
            rows if "rows" in self.checks else rows[:0],
            keys if "keys" in self.checks else keys[:0],
            found.get("lost"),
            found.get("leaked"),
        )

    def _census(
        self, mask: CellMask, probes: Mapping[str, CellMask], head: int, number: int
    ) -> Census:
        """Take a census of all cells, the one with this number of a head."""
        n_parts = 1 + (self.declared is not None and "declared" in self.checks)
        n_heads = max(self.mask.n_heads, self.declared.n_heads if self.declared else 1)
        return take_census(
            mask,
            full_edges(self.n_rows),
            full_edges(self.n_keys),
            head=head,
            probes=tuple(probes.values()),
            report=part_of(self.report, head * n_parts + number, n_parts * n_heads),
            threads=self.threads,
        )

    def _fusion(self, head: int) -> list[FusionRow]:
        """Return how many keys each generated token attends to."""
        first = generated_start(self.segments)
        start = self.n_rows if first is None else first
        found = []
        for first in range(start, self.n_rows, BAND_ROWS):
            rows = np.arange(first, min(first + BAND_ROWS, self.n_rows), dtype=np.int32)
            attended = np.zeros(len(rows), np.int64)
            for low, high in tiles(0, min(int(rows[-1]) + 1, self.n_keys)):
                keys = np.arange(low, high, dtype=np.int32)
                past = self.mask.cells(rows, keys, head) & (keys <= rows[:, None])
                attended += np.count_nonzero(past, axis=1)
            expected = np.minimum(rows + 1, self.n_keys)
            columns = zip(rows.tolist(), attended.tolist(), expected.tolist(), strict=True)
            found += [FusionRow(*each) for each in columns]
        return found


# -- the result in words --------------------------------------------------------------------------


def _cell_lines(result: Verification, places: Places, check: str) -> list[str]:
    """Return the count of a check of cells, and the first cell."""
    if check == "isolation" and not places.segments:
        return []
    lines = [places.labels(f"verify_{check}", count=result.count(check))]
    probes = ((head.head, getattr(head, check)) for head in result.heads)
    return lines + _first_line(result, places, probes, is_open=True)


def _first_line(result: Verification, places: Places, probes: Any, *, is_open: bool) -> list[str]:
    for head, probe in probes:
        if probe is not None and probe.first is not None:
            number = head if len(result.heads) > 1 else None
            cell = places.cell(*probe.first, is_open=is_open, head=number)
            return [f"  {places.labels('verify_first', cell=cell)}"]
    return []


def _fusion_lines(result: Verification, places: Places) -> list[str]:
    """Return what the first generated token attends to, and the first one that misses a key."""
    if not result.heads or not result.heads[0].fusion:
        return []
    first = min((head.fusion[0] for head in result.heads), key=lambda row: row.attended)
    facts = {"attended": first.attended, "expected": first.expected}
    lines = [places.labels("verify_fusion", **facts)]
    if result.count("fusion"):
        lines.append(places.labels("verify_fusion_failed", count=result.count("fusion")))
        row = next(head.unfused[0] for head in result.heads if head.unfused)
        facts = {"attended": row.attended, "expected": row.expected}
        where = places.position(row.position)
        lines.append(f"  {places.labels('verify_fusion_first', position=where, **facts)}")
    return lines


def _position_lines(result: Verification, places: Places, check: str, field: str) -> list[str]:
    count = result.count(check)
    lines = [places.labels(f"verify_{check}", count=count)]
    if not count:
        return lines if len(result.checks) < len(CHECKS) else []
    positions = next(p for head in result.heads if len(p := getattr(head, field)))
    listed = format_ranges(positions[:MAX_LISTED_POSITIONS].tolist())
    listed += ", …" if len(positions) > MAX_LISTED_POSITIONS else ""
    return [*lines, f"  {places.labels('verify_positions', positions=listed)}"]


def _declared_lines(result: Verification, places: Places) -> list[str]:
    if result.declared is None:
        return []
    lost, leaked = (
        sum(probe.count for head in result.heads if (probe := getattr(head, kind)) is not None)
        for kind in ("lost", "leaked")
    )
    facts = {"name": result.declared, "lost": lost, "leaked": leaked}
    lines = [places.labels("verify_declared", **facts)]
    for kind in ("leaked", "lost"):
        probes = ((head.head, getattr(head, kind)) for head in result.heads)
        lines += _first_line(result, places, probes, is_open=kind == "leaked")
    return lines


_LINES = {
    "causal": lambda result, places: _cell_lines(result, places, "causal"),
    "isolation": lambda result, places: _cell_lines(result, places, "isolation"),
    "fusion": _fusion_lines,
    "rows": lambda result, places: _position_lines(result, places, "rows", "empty_rows"),
    "keys": lambda result, places: _position_lines(result, places, "keys", "unseen_keys"),
    "declared": _declared_lines,
}


def _head_json(head: HeadVerification) -> dict[str, Any]:
    cells = {
        name: {"count": probe.count, "first": probe.first}
        for name in ("causal", "isolation", "lost", "leaked")
        if (probe := getattr(head, name)) is not None
    }
    return {
        "head": head.head,
        **cells,
        "fusion": [asdict(row) for row in head.fusion],
        "empty_rows": head.empty_rows[:MAX_LISTED_POSITIONS].tolist(),
        "unseen_keys": head.unseen_keys[:MAX_LISTED_POSITIONS].tolist(),
    }
