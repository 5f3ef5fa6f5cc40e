"""Rows of a prompt that see keys before their own and not their own: `<` where `<=` is meant.

Every row of a causal model sees itself, but for padding and for rows that see nothing at all, which
are told of elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flexinspect.masks import BoolArray
from flexinspect.records import StepRecord
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.views import StepMaskView
from flexinspect.rules.words import format_layers as in_layers

_MAX_STRICT_ROWS = 64


@dataclass(frozen=True, slots=True)
class StrictRows:
    """What to say of such rows, at `positions`.

    It `may_be_meant` when no row sees itself but the first, which would see nothing otherwise.
    """

    sentence: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    may_be_meant: bool


def find_strict_rows(
    context: RuleContext,
    step: StepRecord,
    views: Sequence[StepMaskView],
    find_unpadded: Callable[[], BoolArray],
) -> StrictRows | None:
    """Return what to say of the layers in which rows of a prompt do not see themselves.

    `find_real` finds out which rows are no padding; it is asked only where some are blind.
    """
    blind: dict[tuple[int, ...], list[StepMaskView]] = {}
    for view in views:
        rows = _find_self_blind_rows(view, find_unpadded)
        if rows:
            blind.setdefault(rows, []).append(view)
    if not blind:
        return None
    rows = max(blind, key=len)
    layers = tuple(sorted({layer for view in blind[rows] for layer in view.layers}))
    where = in_layers(layers, len({call.layer for call in step.calls}))
    view = blind[rows][0]
    is_whole = len(rows) + 1 >= view.cells.shape[1]
    first_sees = bool(view.cells[:, 0, 0].any())
    said = _strict_rows_sentence(context, rows, where, is_whole=is_whole)
    return StrictRows(said, layers, rows[:_MAX_STRICT_ROWS], is_whole and first_sees)


def _strict_rows_sentence(
    context: RuleContext, rows: tuple[int, ...], where: str, *, is_whole: bool
) -> str:
    first = rows[0]
    if is_whole:
        return (
            f"No row of the prompt sees itself in {where}, though rows see keys before theirs: "
            f"first {context.format_position(first)}, as if the rule took `<` for `<=`, or an offset that "
            "is one too small."
        )
    one = len(rows) == 1
    return (
        f"{context.format_rows(np.array(rows))} {'does not see itself' if one else 'do not see themselves'} "
        f"in {where}, and {'sees' if one else 'see'} keys before "
        f"{'it' if one else 'them'}, where the other rows see themselves; "
        f"{context.format_first_position(np.array(rows))}."
    )


def _find_self_blind_rows(
    view: StepMaskView, find_unpadded: Callable[[], BoolArray]
) -> tuple[int, ...]:
    """Return the positions of rows of a whole sequence that see keys, and never their own."""
    n = view.cells.shape[1]
    if n < 3 or view.newest_key + 1 != n or view.cells.shape[2] < n:
        return ()
    row = np.arange(n)
    own = view.cells[:, row, row].any(axis=0)
    if own.all():
        return ()
    blind = ~own & view.cells.any(axis=(0, 2))
    if blind.any():
        real = find_unpadded()
        blind &= real if len(real) == n else True
    if blind.sum() + 1 >= n and not view.cells[:, row[1:], row[:-1]].any(axis=0).all():
        return ()  # no off-by-one: a layer that looks at some keys alone
    return tuple(int(pos) for pos in np.flatnonzero(blind) + view.first_key_pos)
