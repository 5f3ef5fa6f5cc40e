"""Runs of tiny models under masks of cells, as own code applies them: faults are cells that differ.

A mask is a function of a layer and of the positions of rows and keys: `cells(layer, rows, keys)`
gives what is open, bool of a shape that rows (n, 1) and keys (1, m) broadcast to, with heads before
it where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache

Cells = Callable[[int, Tensor, Tensor], Tensor]


def attend_by(model: Any, cells: Cells, *, flex: bool = False, first_row: Any = None) -> None:
    """Let a model attend by a mask. `first_row(q_len, kv_len)` may return a wrong row offset."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        n_rows, n_keys = query.shape[2], key.shape[2]
        first = (first_row or (lambda q, kv: kv - q))(n_rows, n_keys)
        rows, keys = torch.arange(first, first + n_rows)[:, None], torch.arange(n_keys)[None]
        open_cells = cells(module.layer_idx, rows, keys)
        if open_cells.dim() == 2:
            open_cells = open_cells.expand(n_rows, n_keys)[None]
        out = _call(query, key, value, open_cells, kwargs.get("scaling"), flex=flex)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("own masks", attention)
    model.set_attn_implementation("own masks")


def _call(
    query: Tensor, key: Tensor, value: Tensor, cells: Tensor, scale: Any, *, flex: bool
) -> Tensor:
    options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if not flex:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=cells[None], **options)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cells[h if len(cells) > 1 else 0, q_idx, kv_idx]

    heads = len(cells) if len(cells) > 1 else None
    mask = create_block_mask(mask_mod, None, heads, *cells.shape[1:], device="cpu")
    out: Any = flex_attention(query, key, value, block_mask=mask, **options)
    return out


def with_cache(model: Any, input_ids: Tensor, n: int = 5) -> list[int]:
    """Generate n tokens greedily, with a cache."""
    cache, chosen = DynamicCache(config=model.config), []
    for _ in range(n):
        input_ids = (
            model(input_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        )
        chosen.append(int(input_ids[0]))
    return chosen


def without_cache(model: Any, input_ids: Tensor, n: int = 4) -> None:
    """Generate n tokens greedily, the whole sequence again each time."""
    for _ in range(n):
        input_ids = torch.cat(
            (input_ids, model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)), 1
        )


def causal(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Every row sees itself and what is before it."""
    return keys <= rows


def inside(pos: Tensor, *spans: tuple[int, int]) -> Tensor:
    """Return which positions lie in any of the spans."""
    found = torch.zeros_like(pos, dtype=torch.bool)
    for start, stop in spans:
        found |= (pos >= start) & (pos < stop)
    return found


def isolated(spans: Sequence[tuple[int, int]], reader: int, *, bos: bool = True) -> Cells:
    """Return the mask that keeps the spans apart; rows from `reader` on see all before them.

    A position in no span belongs to the span before it, and BOS, position 0, is seen by all.
    """
    starts = torch.tensor([0, *(start for start, _ in spans)])

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        mine, theirs = (torch.searchsorted(starts, at, right=True) for at in (rows, keys))
        return (keys <= rows) & ((mine == theirs) | (rows >= reader) | (bos & (keys == 0)))

    return cells
