"""Attention kernels with one planted fault each, and a right one: an online softmax over blocks.

They share no code with the oracle. `plant(name)` returns a kernel `(q, k, v, **options)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 32

Planted = Callable[..., Any]


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    dtype: torch.dtype = torch.float32,
    order: list[int] | None = None,
    kv_heads: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """An online softmax over blocks of 32 keys; `dtype` is that of the sums over keys."""
    group = q.shape[1] // k.shape[1]
    heads = [head // group for head in range(q.shape[1])] if kv_heads is None else kv_heads
    key, value = k[:, heads].float(), v[:, heads].float()
    top = torch.full(q.shape[:3], -torch.inf)
    total = torch.zeros(*q.shape[:3], dtype=dtype)
    out = torch.zeros(q.shape, dtype=dtype)
    for block in range(math.ceil(k.shape[2] / BLOCK)) if order is None else order:
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        scores = torch.einsum("bhqd,bhkd->bhqk", q.float(), key[:, :, part]) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if cells is not None:
            scores = torch.where(cells[..., part], scores, -torch.inf)
        new = torch.maximum(top, scores.amax(-1))
        safe = new.nan_to_num(neginf=0.0)
        weights = (scores - safe[..., None]).exp()
        shrink = (top - safe).exp()
        total = (total.float() * shrink + weights.sum(-1)).to(dtype)
        product = torch.einsum("bhqk,bhkd->bhqd", weights, value[:, :, part])
        out = (out.float() * shrink[..., None] + product).to(dtype)
        top = new
    divided = out.float() / total.float().clamp_min(1e-30)[..., None]
    return divided.to(q.dtype), top.nan_to_num(neginf=0.0) + total.float().log()


def right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    return flash(q, k, v, attn_mask, scale, softcap)


def _closed(k: Tensor, q: Tensor, mask: Tensor | None, keys: Any) -> Tensor:
    shape = (1, 1, q.shape[2], k.shape[2])
    cells = torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone()
    cells[..., keys] = False
    return cells


def last_key_dropped(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, _closed(k, q, attn_mask, -1), scale, None)


def scale_missing(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, attn_mask, 1.0, None)


def mask_inverted(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, None if attn_mask is None else ~attn_mask, scale, None)


def head_swapped(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    heads = [head // (q.shape[1] // k.shape[1]) for head in range(q.shape[1])]
    heads[5] = 0
    return flash(q, k, v, attn_mask, scale, None, kv_heads=heads)


def heads_repeated(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    heads = [head % k.shape[1] for head in range(q.shape[1])]
    return flash(q, k, v, attn_mask, scale, None, kv_heads=heads)


def block_border(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, _closed(k, q, attn_mask, slice(BLOCK - 1, None, BLOCK)), scale, None)


def softcap_ignored(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0, softcap: Any = None
) -> Any:
    return flash(q, k, v, attn_mask, scale, None)


def float16_sums(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, attn_mask, scale, None, dtype=torch.float16)


class RandomOrder:
    """Adds the blocks in another order in each call."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def __call__(self, q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        blocks = torch.randperm(math.ceil(k.shape[2] / BLOCK), generator=self._generator)
        return flash(q, k, v, attn_mask, scale, None, order=blocks.tolist())


class LostBlock(RandomOrder):
    """Loses a block of keys in some calls, as a race does."""

    def __call__(self, q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        n = math.ceil(k.shape[2] / BLOCK)
        lost = int(torch.randint(0, n, (), generator=self._generator))
        order = [block for block in range(n) if block != lost]
        return flash(q, k, v, attn_mask, scale, None, order=order)


def stale_lse(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    n = math.ceil(k.shape[2] / BLOCK)
    out, _ = flash(q, k, v, attn_mask, scale, None)
    return out, flash(q, k, v, attn_mask, scale, None, order=list(range(n - 1)))[1]


class LseOfTheCallBefore:
    """Returns the LSE of the call before."""

    def __init__(self) -> None:
        self._lse: Tensor | None = None

    def __call__(self, q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        out, lse = flash(q, k, v, attn_mask, scale, None)
        before, self._lse = self._lse, lse
        return out, torch.zeros_like(lse) if before is None else before


def wrong_dtype(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, attn_mask, scale, None)[0].float()


def nan_in_a_row(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    out = flash(q, k, v, attn_mask, scale, None)[0]
    out[:, 1, 9] = torch.nan
    return out


def exchanged_values(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, v, k, attn_mask, scale, None)[0]


def keys_in_another_layout(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0
) -> Any:
    return flash(q, k.transpose(1, 2).reshape(k.shape), v, attn_mask, scale, None)[0]


def shifted_values(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, torch.cat([v[:, :, -1:], v[:, :, :-1]], 2), attn_mask, scale, None)[0]


def negative_scores(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(-q, k, v, attn_mask, scale, None)[0]


def dropout_left_on(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    cells = torch.ones(q.shape[2], k.shape[2]).bool() if attn_mask is None else attn_mask
    weights = torch.softmax((q @ k.mT * scale).masked_fill(~cells, -torch.inf), -1)
    return torch.dropout(weights, 0.1, train=True) @ v


def nan_lse(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    out, lse = flash(q, k, v, attn_mask, scale, None)
    return out, lse * torch.nan


# -- wrong addresses and formulas ------------------------------------------------------------------


def _moved(tensor: Tensor, n: int) -> Tensor:
    """What is read `n` elements away; beyond the ends lies something else."""
    flat, other = tensor.flatten(), torch.full((abs(n),), 3.0, dtype=tensor.dtype)
    moved = torch.cat([flat[n:], other]) if n > 0 else torch.cat([other, flat[:n]])
    return moved.reshape(tensor.shape)


def key_pointer_off(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, _moved(k, 1), v, attn_mask, scale, None)


def value_pointer_off(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, _moved(v, -1), attn_mask, scale, None)[0]


def _scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    key, value = (each.float().repeat_interleave(group, 1) for each in (k, v))
    return q.float() @ key.mT, value


def _cells(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask


def rescale_missing(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    scores, value = _scores(q, k, v)
    scores = (scores * scale).masked_fill(~_cells(q, k, attn_mask), -torch.inf)
    top, total = torch.full(q.shape[:3], -torch.inf), torch.zeros(q.shape[:3])
    out = torch.zeros(q.shape)
    for start in range(0, k.shape[2], BLOCK):
        part = scores[..., start : start + BLOCK]
        new = torch.maximum(top, part.amax(-1))
        weights = (part - new[..., None]).exp()
        total = total * (top - new).exp() + weights.sum(-1)
        out, top = out + weights @ value[:, :, start : start + BLOCK], new
    return (out / total[..., None]).to(q.dtype)


def softmax_over_rows(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    scores, value = _scores(q, k, v)
    closed = (scores * scale).masked_fill(~_cells(q, k, attn_mask), -torch.inf)
    return (torch.softmax(closed, -2) @ value).to(q.dtype)


def softcap_before_scale(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0, softcap: Any = None
) -> Any:
    scores, value = _scores(q, k, v)
    capped = softcap * (scores / softcap).tanh() * scale
    closed = capped.masked_fill(~_cells(q, k, attn_mask), -torch.inf)
    return (torch.softmax(closed, -1) @ value).to(q.dtype)


def mask_after_softmax(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    scores, value = _scores(q, k, v)
    return ((torch.softmax(scores * scale, -1) * _cells(q, k, attn_mask)) @ value).to(q.dtype)


def mask_added_as_number(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0
) -> Any:
    scores, value = _scores(q, k, v)
    return (torch.softmax(scores * scale + _cells(q, k, attn_mask), -1) @ value).to(q.dtype)


def not_normalized(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    scores, value = _scores(q, k, v)
    closed = (scores * scale).masked_fill(~_cells(q, k, attn_mask), -torch.inf)
    return ((closed - closed.amax(-1, keepdim=True)).exp() @ value).to(q.dtype)


def scores_as_weights(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    scores, value = _scores(q, k, v)
    return ((scores * scale * _cells(q, k, attn_mask)) @ value).to(q.dtype)


def inputs_in_bfloat16(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    rounded = [each.bfloat16().to(each.dtype) for each in (q, k, v)]
    return flash(*rounded, attn_mask, scale, None)[0]


def last_column_dropped(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0
) -> Any:
    scores, value = _scores(q[..., :-1], k[..., :-1], v)
    closed = (scores * scale).masked_fill(~_cells(q, k, attn_mask), -torch.inf)
    return (torch.softmax(closed, -1) @ value).to(q.dtype)


def batch_ignored(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k[:1].expand_as(k), v[:1].expand_as(v), attn_mask, scale, None)[0]


def padding_unmasked(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    n = -k.shape[2] % BLOCK
    cells = _cells(q, k, attn_mask).expand(1, 1, q.shape[2], k.shape[2])
    padded = [torch.nn.functional.pad(each, (0, 0, 0, n)) for each in (k, v)]
    cells = torch.nn.functional.pad(cells, (0, n), value=True)
    return flash(q, *padded, cells, scale, None)[0]


def last_rows_not_written(
    q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0
) -> Any:
    out = flash(q, k, v, attn_mask, scale, None)[0]
    out[:, :, q.shape[2] // BLOCK * BLOCK :] = 0
    return out


def rows_misplaced(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, attn_mask, scale, None)[0].roll(1, 2)


def heads_misplaced(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    out = flash(q, k, v, attn_mask, scale, None)[0]
    return out.transpose(1, 2).reshape(out.shape)


def scale_off(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, k, v, attn_mask, scale * 1.02, None)[0]


def sum_off(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    out = flash(q, k, v, attn_mask, scale, None)[0]
    return out * torch.linspace(0.9, 1.1, q.shape[2])[:, None].to(out.dtype)


def keys_quantized(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
    return flash(q, (k * 16).round() / 16, v, attn_mask, scale, None)[0]
