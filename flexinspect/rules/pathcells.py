"""What a call on another path did to the mask: lost pairs of it, or kept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexinspect.masks import BoolArray
from flexinspect.records import CallRecord, StepRecord
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted


@dataclass(frozen=True, slots=True)
class Lost:
    """How the mask that a call ran under differs from the one it should have had.

    `words` ends a sentence. `is_sure` says that pairs are open that were to be closed, `is_same`
    that the masks are proved to be the same.
    """

    words: str = ""
    is_sure: bool = False
    is_same: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def lost(step: StepRecord, scene: Scene, call: CallRecord, peers: Sequence[CallRecord]) -> Lost:
    """Compare a call's mask with those of other layers, or with the declared one without them.

    With several other masks (sliding and full layers) the nearest counts. Nothing is said where
    cells were not recorded.
    """
    mine = _cells(scene, call)
    if mine is None:
        return Lost()
    theirs = _of_peers(scene, peers) if peers else _declared(scene, call, mine)
    counts = [_difference(mine, one) for one in theirs if one.shape[1:] == mine.shape[1:]]
    if not counts:
        return Lost()
    leaked, closed = min(counts, key=sum)
    whom = "the other layers keep" if peers else "the declared mask has"
    facts = {"leaked": leaked, "lost": closed}
    if not leaked and not closed:
        return Lost(is_same=True, facts=facts)
    if not leaked:
        return Lost(
            f"; {counted(closed, 'pair')} {_are(closed)} closed that {whom} open", facts=facts
        )
    words = f"; {counted(leaked, 'pair')} {_are(leaked)} open there that {whom} closed"
    return Lost(words, is_sure=True, facts=facts)


def _cells(scene: Scene, call: CallRecord) -> BoolArray | None:
    mask = scene.mask(call.mask)
    return None if mask is None else mask.cells


def _of_peers(scene: Scene, peers: Sequence[CallRecord]) -> list[BoolArray]:
    names = dict.fromkeys(peer.mask for peer in peers)
    masks = (scene.mask(name) for name in names)
    return [mask.cells for mask in masks if mask is not None and mask.cells is not None]


def _declared(scene: Scene, call: CallRecord, mine: BoolArray) -> list[BoolArray]:
    intent, mask = scene.intent, scene.mask(call.mask)
    if intent is None or intent.assumed or mask is None or mask.kv_offset:
        return []
    return [intent.rule.dense(mine.shape[1], mine.shape[2], q_offset=mask.q_offset)[None]]


def _difference(mine: BoolArray, other: BoolArray) -> tuple[int, int]:
    """Return how many pairs are open in mine alone, and in the other alone, in any head."""
    leaked: BoolArray = np.any(mine & ~other, axis=0)
    closed: BoolArray = np.any(~mine & other, axis=0)
    return int(leaked.sum()), int(closed.sum())


def _are(n: int) -> str:
    return "is" if n == 1 else "are"
