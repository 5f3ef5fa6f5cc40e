"""The score_mod of a program in the reference: a table that is added to the scores, or a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.audit.forward.forward_edits import AttentionInput
from flexinspect_hooks.observers.attention.score_mod_cells import modified_scores

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


def heads_of_other_groups(bias: Tensor, n_kv_heads: int) -> list[int]:
    """Return the query heads whose bias is that of another group; none if no such pattern is there.

    `bias` is (heads, rows, keys). Heads of a group are neighbours: head h reads the key head
    h // (heads / kv heads). A score_mod that counts with h % kv heads repeats its values through
    the heads instead, and a head whose two numbers differ has the bias of another group.
    """
    n_heads = bias.shape[0]
    size = n_heads // max(n_kv_heads, 1)
    if n_kv_heads < 2 or size < 2 or n_heads % n_kv_heads:
        return []
    first = bias[:n_kv_heads]
    repeats = torch.equal(bias, first.repeat(size, 1, 1))
    has_own = all(
        not torch.equal(first[one], first[other])
        for one in range(n_kv_heads)
        for other in range(one)
    )
    if not repeats or not has_own:
        return []
    return [head for head in range(n_heads) if head % n_kv_heads != head // size]


def _evaluate(score_mod: Any, score: float, heads: int, n: int, device: torch.device) -> Tensor:
    scores = torch.full((heads, n, n), score, device=device)
    return modified_scores(score_mod, scores, torch.arange(n, device=device))


def attend_with(score_mod: Any, rows: Tensor, call: AttentionInput) -> Tensor:
    """Return softmax attention (1, rows, heads, size) under a score_mod that gets these `rows`."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (call.key, call.value))
    factor = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = (call.query @ key.mT * factor)[0]
    scores = modified_scores(score_mod, scores, rows)[None].to(scores.dtype)
    weights = scores.masked_fill(~call.allowed, -math.inf).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2)
