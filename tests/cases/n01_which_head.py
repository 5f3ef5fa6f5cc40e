"""Query heads of a group are neighbours, and a mask_mod counts query heads."""

import kit
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROWS = 8

query = kit.numbers(1, 4, ROWS, 16, seed=1)
key, value = kit.numbers(1, 2, ROWS, 16, seed=2), kit.numbers(1, 2, ROWS, 16, seed=3)
grouped = flex_attention(query, key, value, enable_gqa=True)
interleaved = [x.repeat_interleave(2, 1) for x in (key, value)]
repeated = [x.repeat(1, 2, 1, 1) for x in (key, value)]
for name, parts in (("repeat_interleave", interleaved), ("repeat", repeated)):
    same = torch.allclose(grouped, F.scaled_dot_product_attention(query, *parts), atol=1e-4)
    print(f"{name} is the same as grouped queries: {same}")

mask = create_block_mask(
    lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((h != 3) | (kv_idx == 0)),
    *(1, 4, ROWS, ROWS),
    device="cpu",
)
out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
first = value[0, 1, 0].expand(ROWS, -1)
print("query head 3 reads kv head 1:", torch.allclose(out[0, 3], first, atol=1e-5))
