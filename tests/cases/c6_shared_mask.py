"""Correct: one BlockMask of batch 1 and head 1 for 8 sequences and 32 heads that all share it."""

import kit
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

ROWS = 16

query, key, value = (kit.numbers(8, 32, ROWS, 16, seed=s) for s in (1, 2, 3))
mask = kit.block_mask(kit.causal(ROWS))
out = flex_attention(query, key, value, block_mask=mask)
reference = F.scaled_dot_product_attention(query, key, value, is_causal=True)
print("mask:", mask.shape, "queries:", tuple(query.shape))
print("right:", torch.allclose(out, reference, atol=1e-4))
