"""A tensor that the mask_mod reads changes after the mask was made; compiled flex keeps the old."""

import kit
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

LENGTH = 512

query, key, value = (kit.numbers(1, 1, LENGTH, 16, seed=s) for s in (1, 2, 3))
segment = torch.arange(LENGTH) // 128
mask = create_block_mask(
    lambda b, h, q_idx, kv_idx: (segment[q_idx] == segment[kv_idx]) & (kv_idx <= q_idx),
    *(None, None, LENGTH, LENGTH),
    device="cpu",
)
segment.copy_(torch.arange(LENGTH) // 256)
now = create_mask(mask.mask_mod, 1, 1, LENGTH, LENGTH, device="cpu")
reference = F.scaled_dot_product_attention(query, key, value, attn_mask=now)
for name, call in (("uncompiled", flex_attention), ("compiled", torch.compile(flex_attention))):
    out = call(query, key, value, block_mask=mask)
    rows = kit.rows_that((out - reference).abs().amax(-1)[0, 0] > 1e-3)
    blocks = sorted({row // 128 for row in rows})
    print(f"{name}: rows that differ from the rule: {len(rows)}, in blocks {blocks}")
held = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
print("blocks in the tables:", held, "of the rule:", 6)
