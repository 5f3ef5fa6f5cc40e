"""Correct: NaN in key slots that the mask closes. In value slots it is not: 0 times NaN is NaN."""

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FILLED, SLOTS = 12, 16

mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < FILLED, None, None, 4, SLOTS, "cpu")
query = kit.numbers(1, 1, 4, 16)
for where in ("keys", "values"):
    key, value = kit.numbers(1, 1, SLOTS, 16, seed=1), kit.numbers(1, 1, SLOTS, 16, seed=2)
    (key if where == "keys" else value)[:, :, FILLED:] = torch.nan
    out = flex_attention(query, key, value, block_mask=mask)
    print(f"NaN in masked {where}: rows with NaN:", kit.rows_that(out.isnan()[0, 0].any(-1)))
