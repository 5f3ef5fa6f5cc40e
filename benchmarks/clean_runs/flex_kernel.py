"""An attention function of a program's own: FlexAttention, not compiled, under any mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

NAME = "own_flex_attention"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention of (batch, heads, rows, size), as (batch, rows, heads, size)."""
    if not isinstance(mask, BlockMask):
        mask = _block_mask(mask, query, key)
    out: Any = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _block_mask(cells: Tensor | None, query: Tensor, key: Tensor) -> BlockMask:
    """Return a block mask of cells, bool (batch, 1, rows, keys); causal without them.

    As in `scaled_dot_product_attention`, a causal mask begins at the first key.
    """
    n_batch, n_rows, n_keys = len(query), query.shape[2], key.shape[2]
    if cells is None:
        last = torch.arange(n_rows)[:, None] if n_rows > 1 else n_keys - 1
        cells = (torch.arange(n_keys)[None] <= last).expand(n_batch, 1, -1, -1)
    table = cells

    def open_cells(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, 0, q_idx, kv_idx]

    return create_block_mask(open_cells, n_batch, None, n_rows, n_keys, device="cpu")


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
