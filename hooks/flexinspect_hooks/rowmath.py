"""The arithmetic of attention rows, written once for torch and numpy: `xp` is either of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def attention_scores(xp: Any, queries: Any, keys: Sequence[Any]) -> Any:
    """Return queries (layers, kv heads, group, D) @ keys, as (layers, q heads, keys).

    In torch the keys come first: that takes two thirds of the time.
    """
    if xp is np:
        return layer_products(xp, queries, [xp.swapaxes(key, -1, -2) for key in keys])
    turned = [torch.bmm(key, row) for key, row in zip(keys, queries.mT.unbind(0), strict=True)]
    return torch.stack(turned).mT.reshape(len(turned), -1, turned[0].shape[1])


def grouped(weights: Any, values: Sequence[Any]) -> Any:
    """Return weights (layers, q heads, keys) as (layers, kv heads, group, keys)."""
    return weights.reshape(len(weights), len(values[0]), -1, weights.shape[-1])


def layer_products(xp: Any, left: Any, right: Sequence[Any]) -> Any:
    """Return left @ right layer by layer, (layers, kv heads, group, n) as (layers, q heads, n)."""
    multiply = np.matmul if xp is np else torch.bmm  # torch's own matmul takes a third longer
    found = xp.stack([multiply(one, other) for one, other in zip(left, right, strict=True)])
    return found.reshape(len(found), -1, found.shape[-1])


def capped(xp: Any, scores: Any, cap: float | None) -> Any:
    """Return scores under a soft cap: cap * tanh(scores / cap)."""
    return cap * xp.tanh(scores / cap) if cap else scores


def mask_scores(xp: Any, scores: Any, closed: Any, value: float) -> Any:
    """Return scores with `value` in closed cells."""
    # Most decode rows close nothing; on an accelerator nobody waits to know.
    if (xp is np or closed.device.type == "cpu") and not closed.any():
        return scores
    return xp.where(closed, xp.full_like(scores, value), scores)


def shift_lowest_rows(xp: Any, scores: Any, closed: Any) -> Any:
    """Return scores with rows that lie at the lowest float moved to 0, where exp tells them apart.

    Softmax gives the same for them; a row without any open key stays as it is.
    """
    top = xp.amax(mask_scores(xp, scores, closed, -math.inf), axis=-1)[..., None]
    is_low = (top < LOWEST / 2) & (top > -math.inf)
    return xp.where(is_low, scores - top, scores)


LOWEST = float(np.finfo(np.float32).min)


def softmax_weights(xp: Any, seen: Any, lse: Any) -> tuple[Any, Any]:
    """Return the LSE, computed unless given, and exp(score - LSE).

    A row that sees nothing has LSE -inf and no weights.
    """
    base = xp.amax(seen, axis=-1) if lse is None else lse
    base = xp.where(base > -math.inf, base, xp.zeros_like(base))
    weights = xp.exp(seen - base[..., None])
    if lse is not None:
        return lse, weights
    total = xp.sum(weights, axis=-1)
    weights /= xp.where(total > 0, total, xp.ones_like(total))[..., None]
    return base + xp.log(total), weights


def segment_membership(n_keys: int, borders: Tensor) -> Tensor:
    """Return float32 (keys, segments), 1 where a key lies in a segment; segments end at borders."""
    places = torch.arange(n_keys, device=borders.device)[:, None]
    return ((places >= borders[:-1]) & (places < borders[1:])).float()


def output_error(xp: Any, recomputed: Any, output: Any) -> Any:
    """Return the gate (layers): the largest error of a row's output, relative to its largest."""
    shape = (len(recomputed), -1)
    largest = xp.amax(xp.abs(output).reshape(shape), -1)
    error = xp.amax(xp.abs(recomputed - output.reshape(recomputed.shape)).reshape(shape), -1)
    return error / xp.clip(largest, 1e-6, None)
