"""The score_mod of a program as a table that is added to the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 1024
"""Tables of longer sequences are not made."""


def additive_bias(score_mod: Any, heads: int, n: int, device: torch.device) -> Tensor | None:
    """Return what a score_mod adds to each score, (heads, rows, keys) of batch row 0.

    None if it does more than add, or cannot be evaluated.
    """
    if n > MAX_ROWS:
        return None
    try:
        at_0, at_1 = (_evaluate(score_mod, value, heads, n, device) for value in (0.0, 1.0))
    except Exception:  # code of the user
        return None
    is_additive = torch.allclose(at_1 - at_0, torch.ones_like(at_0), atol=1e-5)
    is_finite = bool(at_0.isfinite().all())
    return at_0 if is_additive and is_finite else None


def _evaluate(score_mod: Any, score: float, heads: int, n: int, device: torch.device) -> Tensor:
    scores = torch.full((heads, n, n), score, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    head, index = torch.arange(heads, device=device), torch.arange(n, device=device)
    function = score_mod
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    result: Tensor = function(scores, zero, head, index, index)
    return result.expand_as(scores).float()
