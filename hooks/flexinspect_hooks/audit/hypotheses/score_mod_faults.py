"""Hypotheses about a score_mod that does more than add: cells whose score it sets to a constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.evidence.difference_shape import positions_text
from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit
from flexinspect_hooks.audit.forward.score_mods import MAX_ROWS, attend_with
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe
from flexinspect_hooks.observers.attention.score_mod_cells import modified_scores

Edits = Iterator[ForwardEdit]
_SCORES = (0.0, 1.0, -2.5)
"""Scores that a score_mod is given: a cell that gets the same value from all is a constant."""
_CLOSED = -30.0
"""A constant below it closes a cell: exp(-30) is less than rounding of float32."""


class SetCells(Struct, frozen=True):
    """Cells (heads, rows, keys) whose score is `value`, whatever it was."""

    cells: Tensor
    value: float

    def text(self, first_row: int) -> str:
        """Return the keys, heads and rows, with `first_row` as the position of row 0."""
        heads, rows, keys = (
            self.cells.flatten(1).any(1),
            self.cells.any(0).any(1),
            self.cells.any(0).any(0),
        )
        where = _places(keys).replace("position", "key")
        sentence = f"the scores of {where} to {self.value:g}"
        if not bool(heads.all()):
            listed = heads.nonzero().flatten().tolist()
            name = "head" if len(listed) == 1 else "heads"
            sentence += f" in {name} {', '.join(map(str, listed))}"
        return f"{sentence}, for the rows of {_places(rows, first_row)}"


def _places(is_set: Tensor, first: int = 0) -> str:
    return positions_text([first + int(one) for one in is_set.nonzero().flatten()])


def set_cells(score_mod: Any, heads: int, rows: range, n_keys: int) -> SetCells | None:
    """Return causal cells that a score_mod sets to a constant that does not close them.

    `rows` are the positions of the rows that it counts from 0. None if there are no such cells, if
    they have several values, if they are all there are, or if it cannot be evaluated.
    """
    if max(n_keys, len(rows)) > MAX_ROWS:
        return None
    index, device = torch.arange(len(rows)), torch.device("cpu")
    size = (heads, len(rows), n_keys)
    try:
        tables = [
            modified_scores(score_mod, torch.full(size, one, device=device), index)
            for one in _SCORES
        ]
    except Exception:  # code of the user
        return None
    first = tables[0]
    causal = torch.arange(n_keys) <= torch.tensor(list(rows))[:, None]
    is_set = causal & first.isfinite() & (first > _CLOSED)
    for other in tables[1:]:
        is_set = is_set & (other == first)
    values = set(first[is_set].tolist())
    if len(values) != 1 or bool((is_set | ~causal).all()):
        return None
    return SetCells(is_set, values.pop())


def scores_set(probe: FaultProbe) -> Edits:
    """The program's score_mod sets scores to a constant, where -inf would close their keys."""
    own = probe.score_mods.get(-1 if probe.layer is None else probe.layer)
    if own is None or probe.encoder is not None:
        return
    heads = getattr(probe.config, "num_attention_heads", 1)
    start = probe.first_row
    stop = start + 1 if probe.is_decode else probe.n_prompt
    found = set_cells(own, heads, range(start, max(stop, start + 1)), max(stop, start + 1))
    if found is None:
        return

    def weights(call: AttentionInput) -> Tensor:
        rows = torch.arange(call.query.shape[2], device=call.query.device) - start
        return attend_with(own, rows, call)

    sentence = f"whose score_mod sets {found.text(start)}, which does not close them as -inf does"
    yield ForwardEdit(
        name="score-mod.constant",
        sentence=sentence,
        attention=lambda call: replace(call, output=weights, bias=None),
    )


HYPOTHESES = (scores_set,)
