"""The cells that a score_mod closes: FlexAttention allows a mask as a score_mod that gives -inf.

The score_mod that the kernel received is evaluated for all heads, rows and keys, as the kernel does
it, on scores of 0. Most score_mods close nothing; those are evaluated once in a generation, and
recognized by their code afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.debugger.frames import breakpoints_disabled

CLOSED_SCORE = -5000.0
"""A score below it closes its cell: exp(-5000) is 0 in every dtype. Programs use -1e4 and -1e9."""

MAX_CELLS = 1 << 22
"""Cells of all heads that are evaluated at once."""
MAX_MASK = 1 << 26
"""Cells of a head that are evaluated; a score_mod of a larger mask counts as closing none."""
N_SAMPLED = 8
"""Rows in which the heads of a large mask are compared: if they are equal, one is evaluated."""


class ScoreModCells:
    """Evaluates the score_mods of one generation after the other."""

    def __init__(self) -> None:
        self._closes: dict[Any, bool] = {}

    def begin(self) -> None:
        """A generation begins, in which the same code may have captured other values."""
        self._closes.clear()

    def may_close(self, score_mod: Any) -> bool:
        """Whether a score_mod closes cells, or has not been evaluated yet."""
        return score_mod is not None and self._closes.get(_code_of(score_mod), True)

    def closes(self, score_mod: Any) -> bool:
        """Whether a score_mod of this code was seen to close cells."""
        return score_mod is not None and self._closes.get(_code_of(score_mod), False)

    def open_cells(
        self, score_mod: Any, heads: int, q_len: int, kv_len: int, device: torch.device
    ) -> Tensor | None:
        """Return the cells that it leaves open, bool (1 or heads, q_len, kv_len).

        None if it closes none, cannot be evaluated, or if there are too many cells to evaluate.
        Waits for the device until it is known whether this code closes cells.
        """
        if q_len * kv_len > MAX_MASK:
            return None
        code = _code_of(score_mod)
        try:
            with breakpoints_disabled():
                cells = _evaluate(score_mod, heads, q_len, kv_len, device)
        except Exception:  # code of the user
            self._closes[code] = False
            return None
        if cells is None or self._closes.get(code):
            return cells  # to ask whether it closes any would wait for the device in each step
        closes = not bool(cells.all())
        if q_len > 1 or closes:
            self._closes[code] = closes
        if not closes:
            return None
        return cells


def _evaluate(
    score_mod: Any, heads: int, q_len: int, kv_len: int, device: torch.device
) -> Tensor | None:
    """Return the open cells, (heads, q_len, kv_len); None if heads of a large mask differ."""
    rows = torch.arange(q_len, device=device)
    if heads * q_len * kv_len > MAX_CELLS:
        sampled = _open_cells(score_mod, heads, rows[:: -(-q_len // N_SAMPLED)], kv_len)
        if not bool((sampled == sampled[:1]).all()):
            return None
        heads = 1
    size = max(MAX_CELLS // (heads * kv_len), 1)
    parts = [_open_cells(score_mod, heads, part, kv_len) for part in torch.split(rows, size)]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _open_cells(score_mod: Any, heads: int, rows: Tensor, kv_len: int) -> Tensor:
    scores = torch.zeros(heads, len(rows), kv_len, device=rows.device)
    return ~(modified_scores(score_mod, scores, rows) < CLOSED_SCORE)  # NaN closes nothing


def _code_of(score_mod: Any) -> Any:
    function = getattr(score_mod, "func", score_mod)  # of a partial
    return getattr(function, "__code__", type(function))


def modified_scores(score_mod: Any, scores: Tensor, rows: Tensor) -> Tensor:
    """Return what a score_mod makes of scores (heads, rows, keys) of batch row 0.

    `rows` are the indices that it receives. What it raises is not caught.
    """
    zero = torch.zeros((), dtype=torch.long, device=scores.device)
    heads, _, n_keys = scores.shape
    head, key = (torch.arange(n, device=scores.device) for n in (heads, n_keys))
    function = score_mod
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    result: Tensor = function(scores, zero, head, rows, key)
    return result.expand_as(scores).float()
