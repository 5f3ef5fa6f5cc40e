"""Segments that do not see each other, at position ids that run on over them: shown, not judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import MaskRecord, StepRecord
from flexinspect.rules.base import FindingKind
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import printable

NOT_RESET = "positions.not-reset"

NOT_RESET_KIND = FindingKind(
    Severity.NOTE,
    "isolated segments at position ids that run on over them",
    why="Inside of a segment nothing changes by it. The rows that see several segments have them "
    "at unlike distances, so under rotary embeddings the answer depends on their order. That is a "
    "modelling choice: shown, not judged.",
    confirm="The order-swap check: run it again with the two segments in the other order and "
    "compare the logits of the first generated token (panel logits, step 0).",
    fix="If the order is not to matter, begin the position ids of each segment anew after what "
    "they share, and let the text after them go on from the longest.",
    query="SELECT t.segment, s.label, min(t.position_id) AS first_id, "
    "max(t.position_id) AS last_id FROM tokens t "
    "JOIN segments s USING (generation, branch, segment) "
    "WHERE t.generation = {generation} AND t.branch = {branch} GROUP BY t.segment",
)


@dataclass(frozen=True, slots=True)
class IsolatedPair:
    """Two segments that do not see each other, and the position ids at which they begin."""

    first: Segment
    second: Segment
    first_id: int
    second_id: int


def find_isolated_pairs(
    context: RuleContext, step: StepRecord, ids: npt.NDArray[Any]
) -> list[IsolatedPair]:
    """Return segments that a prompt's executed mask keeps apart while the ids run on over them.

    `ids` are the position ids (rows,) of batch row 0. One layer that keeps them apart is enough.
    """
    pieces = [
        s for s in context.segments if s.kind is SegmentKind.PARAPHRASE and s.stop <= len(ids)
    ]
    pairs = [(a, b) for a, b in combinations(pieces, 2) if ids[b.start] > ids[a.stop - 1]]
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        cells = _common_cells(context.mask(fingerprint), len(ids))
        found = [] if cells is None else [pair for pair in pairs if _is_isolated(cells, *pair)]
        if found:
            return [IsolatedPair(a, b, int(ids[a.start]), int(ids[b.start])) for a, b in found]
    return []


def check_position_order(
    context: RuleContext, step: StepRecord, pairs: Sequence[IsolatedPair]
) -> list[Finding]:
    """Return a note on the first of these pairs that some row of a step sees both of."""
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        mask = context.mask(fingerprint)
        if mask is None or mask.cells is None or mask.kv_offset:
            continue
        for pair in pairs:
            sees = [
                mask.cells[..., segment.start : segment.stop].any(axis=2)
                for segment in (pair.first, pair.second)
            ]
            if (sees[0] & sees[1]).any():
                return [_not_reset_finding(context, step, pair)]
    return []


def _common_cells(mask: MaskRecord | None, n: int) -> BoolArray | None:
    """Return the cells (rows, keys) that any head opens, None where they are not those of all."""
    if mask is None or mask.cells is None or mask.cells.shape[1] != n:
        return None
    if mask.averaged is not None or mask.cells.shape[2] < n:
        return None
    cells: BoolArray = np.any(mask.cells, axis=0)
    return cells


def _is_isolated(cells: BoolArray, first: Segment, second: Segment) -> bool:
    one, other = slice(first.start, first.stop), slice(second.start, second.stop)
    return not cells[other, one].any() and not cells[one, other].any()


def _not_reset_finding(context: RuleContext, step: StepRecord, pair: IsolatedPair) -> Finding:
    a, b = printable(pair.first.label), printable(pair.second.label)
    return Finding(
        id=NOT_RESET,
        severity=Severity.NOTE,
        sentence=(
            f"Position ids are not restarted at {b}: it begins at {pair.second_id} "
            f"({context.format_position(pair.second.start)}), and {a}, which it does not see, at "
            f"{pair.first_id}; a row that sees both has them at unlike distances, so their order "
            "may matter (a modelling choice: shown, not judged)."
        ),
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        positions=(pair.second.start,),
        evidence={
            "first": a,
            "second": b,
            "first_id": pair.first_id,
            "second_id": pair.second_id,
        },
        series="order",
    )
