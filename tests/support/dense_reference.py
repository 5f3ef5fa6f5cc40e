"""Dense attention under the same mask: the reference that runs and records are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.masks.mask_presets import BoolArray
from flexinspect_hooks.generation.flex_patch import model_configs


def additive_mask(cells: BoolArray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 4-D additive mask (1, 1, n_q, n_kv): 0 where open, the lowest float where closed.

    This is the convention of transformers' eager attention (huggingface/transformers#46507).
    """
    closed = torch.from_numpy(~cells).to(device)
    mask = torch.zeros(cells.shape, dtype=dtype, device=device)
    return mask.masked_fill(closed, torch.finfo(dtype).min)[None, None]


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Use a model's eager attention inside the context, then restore its implementation."""
    saved = [(config, config._attn_implementation_internal) for config in model_configs(model)]
    for config, _ in saved:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, value in saved:
            config._attn_implementation_internal = value


@torch.no_grad()
def dense_forward(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    cells: BoolArray,
    *,
    windows: dict[str, int] | None = None,
) -> Any:
    """Run one forward pass over the whole sequence with a dense mask, without a cache.

    `ids` and `positions` are (1, n), `cells` bool (n, n). `windows` maps a layer type to its
    sliding window, for models whose layers differ: each type gets its own mask.
    """
    dtype = next(model.parameters()).dtype
    with eager_attention(model):
        mask: Any = additive_mask(cells, dtype, ids.device)
        if windows:
            mask = {
                kind: additive_mask(cells & _band(len(cells), size), dtype, ids.device)
                for kind, size in windows.items()
            }
        return model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            output_hidden_states=True,
        )


def _band(n: int, size: int) -> BoolArray:
    index = np.arange(n)
    band: BoolArray = index[:, None] - index[None] < size
    return band


def attention_row(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    visible: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """The attention weights (heads, rows, keys) in float64.

    `query` (q heads, rows, D), `key` (kv heads, keys, D), `visible` bool broadcastable to the
    result; neighbouring query heads share a key head.
    """
    groups = query.shape[0] // key.shape[0]
    scores = query.double() @ key.double().repeat_interleave(groups, 0).transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    return torch.nan_to_num(weights)
