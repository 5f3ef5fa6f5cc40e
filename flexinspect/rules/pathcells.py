"""What a call on another path did to the mask: lost pairs of it, or kept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexinspect.masks import BoolArray
from flexinspect.records import CallRecord, StepRecord
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import plural


@dataclass(frozen=True, slots=True)
class MaskComparison:
    """How the mask that a call ran under differs from the one it should have had.

    `words` ends a sentence. `is_sure` says that pairs are open that were to be closed, `is_same`
    that the masks are proved to be the same.
    """

    description: str = ""
    has_leak: bool = False
    is_same: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


def compare_call_mask(
    step: StepRecord, context: RuleContext, call: CallRecord, peers: Sequence[CallRecord]
) -> MaskComparison:
    """Compare a call's mask with those of other layers, or with the declared one without them.

    With several other masks (sliding and full layers) the nearest counts. Nothing is said where
    cells were not recorded.
    """
    mine = _call_cells(context, call)
    if mine is None:
        return MaskComparison()
    theirs = _peer_cells(context, peers) if peers else _declared_cells(context, call, mine)
    counts = [
        _count_differing_pairs(mine, one) for one in theirs if one.shape[1:] == mine.shape[1:]
    ]
    if not counts:
        return MaskComparison()
    leaked, closed = min(counts, key=sum)
    whom = "the other layers keep" if peers else "the declared mask has"
    facts = {"leaked": leaked, "lost": closed}
    if not leaked and not closed:
        return MaskComparison(is_same=True, evidence=facts)
    if not leaked:
        return MaskComparison(
            f"; {plural(closed, 'pair')} {_is_or_are(closed)} closed that {whom} open",
            evidence=facts,
        )
    words = f"; {plural(leaked, 'pair')} {_is_or_are(leaked)} open there that {whom} closed"
    return MaskComparison(words, has_leak=True, evidence=facts)


def _call_cells(context: RuleContext, call: CallRecord) -> BoolArray | None:
    mask = context.mask(call.mask)
    return None if mask is None else mask.cells


def _peer_cells(context: RuleContext, peers: Sequence[CallRecord]) -> list[BoolArray]:
    names = dict.fromkeys(peer.mask for peer in peers)
    masks = (context.mask(name) for name in names)
    return [mask.cells for mask in masks if mask is not None and mask.cells is not None]


def _declared_cells(context: RuleContext, call: CallRecord, mine: BoolArray) -> list[BoolArray]:
    intent, mask = context.declared_mask, context.mask(call.mask)
    if intent is None or intent.assumed or mask is None or mask.kv_offset:
        return []
    return [intent.spec.dense(mine.shape[1], mine.shape[2], q_offset=mask.q_offset)[None]]


def _count_differing_pairs(mine: BoolArray, other: BoolArray) -> tuple[int, int]:
    """Return how many pairs are open in mine alone, and in the other alone, in any head."""
    leaked: BoolArray = np.any(mine & ~other, axis=0)
    closed: BoolArray = np.any(~mine & other, axis=0)
    return int(leaked.sum()), int(closed.sum())


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
