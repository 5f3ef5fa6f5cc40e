"""Prompts whose rows see the key before their own and never their own: `<` where `<=` is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexinspect.records import StepRecord
from flexinspect.rules.scene import Scene
from flexinspect.rules.views import View
from flexinspect.rules.words import layers as in_layers

_MOST = 64


@dataclass(frozen=True, slots=True)
class StrictRows:
    """What to say of such a prompt; `last` is the position of its last row."""

    sentence: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    last: int


def strict_rows(scene: Scene, step: StepRecord, views: Sequence[View]) -> StrictRows | None:
    """Return what to say of the layers in which no row of a prompt sees itself, None if none."""
    blind = [view for view in views if _is_strict(view)]
    if not blind:
        return None
    first, last = blind[0].first, blind[0].last
    layers = tuple(sorted({layer for view in blind for layer in view.layers}))
    where = in_layers(layers, len({call.layer for call in step.calls}))
    sentence = (
        f"No row of the prompt sees itself in {where}, though rows see the key before theirs: "
        f"{scene.position(first + 1)} sees {scene.position(first)} and not itself, as if the rule "
        "took `<` for `<=`, or an offset that is one too small."
    )
    return StrictRows(sentence, layers, tuple(range(first, last + 1))[:_MOST], last)


def _is_strict(view: View) -> bool:
    """Say whether rows of a whole sequence see the key before theirs, and none its own."""
    n = view.cells.shape[1]
    if n < 3 or view.at + 1 != n:
        return False
    row = np.arange(1, n)
    return not view.cells[:, row, row].any() and bool(view.cells[:, row, row - 1].any(axis=0).all())
