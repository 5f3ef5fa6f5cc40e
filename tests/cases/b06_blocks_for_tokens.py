"""The block-level view of a mask of 40 tokens is one cell, and is taken for the mask."""

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

LENGTH = 40

mask = create_block_mask(
    lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, LENGTH, LENGTH, "cpu"
)
query = kit.numbers(1, 1, LENGTH, 16)
flex_attention(query, query, query, block_mask=mask)
cells = create_mask(mask.mask_mod, 1, 1, LENGTH, LENGTH, device="cpu")
print(
    "to_dense:", tuple(mask.to_dense().shape), "sparsity makes sense:", 0 <= mask.sparsity() <= 100
)
print(
    "cells:",
    tuple(cells.shape),
    "open:",
    int(cells.sum()),
    "causal:",
    torch.equal(cells[0, 0], kit.causal(LENGTH)),
)
