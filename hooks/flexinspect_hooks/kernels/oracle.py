"""The oracle: attention written out, in float64 or in a kernel's own dtype, and its variations.

In float64 it is the truth that kernels are compared with. In the kernel's dtype it is the reference
whose rounding sets the tolerance. A variation changes one part (the mask, the scale, which key head
a query head uses), so that a fault can be confirmed by reproducing its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.kernels.problem import Problem, ScoreMod, apply_score_mod

_ACCUMULATION_BLOCKS = (1, 16, 32, 64, 128)
SCORE_ORDER = ("scale", "softcap", "score_mod")
"""The order in which scores are changed: FlexAttention's score_mod gets them scaled."""


class Variation(Struct, frozen=True):
    """How attention is computed; the defaults of `of` are those of the problem.

    `kv_head` gives the key head of each query head. `cells` is bool, broadcastable to (batch,
    heads, rows, keys). `order` is that of the changes of the scores.
    """

    cells: Tensor
    scale: float
    softcap: float | None
    score_mod: ScoreMod | None
    kv_head: tuple[int, ...]
    order: tuple[str, ...] = SCORE_ORDER

    @classmethod
    def of(cls, problem: Problem) -> Variation:
        """The problem as it is stated: neighbouring query heads share a key head."""
        config = problem.config
        group = config.q_heads // config.kv_heads
        heads = tuple(head // group for head in range(config.q_heads))
        scale, softcap = config.used_scale, config.softcap
        return cls(problem.cells, scale, softcap, problem.score_mod, heads)


class Attention(Struct, frozen=True):
    """Output (batch, heads, rows, head size), LSE (batch, heads, rows), natural logarithm."""

    out: Tensor
    lse: Tensor


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention by its definition in the dtype of q, and the LSE in float32 or wider.

    A row without an open key has the output 0 and the LSE -inf, as in FlexAttention.
    """
    group = q.shape[1] // k.shape[1]
    key, value = (each.repeat_interleave(group, 1) if group > 1 else each for each in (k, v))
    scores = eager_scores(q, key, scale=scale, softcap=softcap, score_mod=score_mod)
    return _softmax_and_sum(scores, value, attn_mask)


def _softmax_and_sum(
    scores: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    filled = scores
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
        # The softmax of a row of -inf is NaN, in the gradients of all keys too.
        filled = scores.masked_fill(~attn_mask.any(-1, keepdim=True), 0)
    weights = torch.softmax(filled, -1)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, 0)
    wide = scores if scores.dtype is torch.float64 else scores.float()
    return weights @ value, torch.logsumexp(wide, -1)


def eager_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    score_mod: ScoreMod | None,
    order: tuple[str, ...] = SCORE_ORDER,
) -> Tensor:
    """Return the scores before the mask, (batch, heads, rows, keys), for one key head per head."""
    scores = q @ k.mT
    for change in order:
        if change == "scale":
            scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        elif change == "softcap" and softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        elif change == "score_mod" and score_mod is not None:
            scores = apply_score_mod(score_mod, scores).to(q.dtype)
    return scores


def scores_of(problem: Problem, variation: Variation, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the scores of a variation before the mask, every step rounded to `dtype`."""
    return eager_scores(
        problem.q.to(dtype),
        problem.k[:, list(variation.kv_head)].to(dtype),
        scale=variation.scale,
        softcap=variation.softcap,
        score_mod=variation.score_mod,
        order=variation.order,
    )


def attend(
    problem: Problem,
    variation: Variation | None = None,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """Return attention as the problem states it or varied, every step rounded to `dtype`."""
    variation = Variation.of(problem) if variation is None else variation
    value = problem.v[:, list(variation.kv_head)].to(dtype)
    scores = scores_of(problem, variation, dtype)
    return Attention(*_softmax_and_sum(scores, value, variation.cells))


def weights_of(problem: Problem, variation: Variation) -> Tensor:
    """Return the attention weights in float64, (batch, heads, rows, keys), 0 in empty rows."""
    cells = variation.cells
    scores = scores_of(problem, variation).masked_fill(~cells, -torch.inf)
    return torch.softmax(scores, -1).masked_fill(~cells, 0)


def accumulate(problem: Problem, dtype: torch.dtype, block: int, *, online: bool) -> Attention:
    """Return attention whose sums over keys are rounded to `dtype` after each block of keys.

    `online` keeps a running maximum and divides by the sum at the end, as FlashAttention does;
    otherwise weights are divided first, as in eager attention.
    """
    variation = Variation.of(problem)
    scores = scores_of(problem, variation).masked_fill(~variation.cells, -torch.inf)
    value = problem.v[:, list(variation.kv_head)].double()
    top = torch.full_like(scores[..., :1], -torch.inf)
    if not online:
        top = scores.logsumexp(-1, keepdim=True)
    out = torch.zeros_like(problem.q, dtype=torch.float64)
    total = torch.zeros_like(scores[..., :1])
    for start in range(0, problem.config.kv_len, block):
        part = scores[..., start : start + block]
        new = torch.maximum(top, part.amax(-1, keepdim=True)) if online else top
        safe = new.nan_to_num(neginf=0.0)
        weights, shrink = (part - safe).exp(), (top - safe).exp() if online else 1.0
        total = (total * shrink + weights.sum(-1, keepdim=True)).to(dtype).double()
        product = weights @ value[..., start : start + block, :]
        out, top = (out * shrink + product).to(dtype).double(), new
    lse = (top.nan_to_num(neginf=0.0) + total.log())[..., 0]
    divided = (out / total).nan_to_num(0.0) if online else out
    return Attention(divided.to(problem.dtype).double(), lse)


def low_precision_sums(problem: Problem) -> Iterator[tuple[str, int, Attention]]:
    """Yield attention with sums of low precision: (dtype, keys between two roundings, result)."""
    for dtype in (torch.float16, torch.bfloat16):
        for block in _ACCUMULATION_BLOCKS:
            for online in (True, False):
                result = accumulate(problem, dtype, block, online=online)
                yield str(dtype).removeprefix("torch."), block, result
