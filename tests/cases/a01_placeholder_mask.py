"""The wrapper hands flex a mask that is always true; the one that was built is never used."""

from typing import Any

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

PROMPT = 12

requested = kit.causal(PROMPT)
executed = torch.zeros_like(requested)


def placeholder(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= 0


def wrapper(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    lengths = (query.shape[2], key.shape[2])
    mask = create_block_mask(placeholder, None, None, *lengths, device="cpu")
    scale = kwargs["scaling"]
    out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    executed.fill_(True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("wrapper", wrapper)
run = kit.logits_of(kit.tiny("wrapper"))
ids = kit.ids(PROMPT, bos=True)
print("FlexAttention ran without fallback")
print("rows that touching the LAST token moves:", kit.rows_that(kit.moved(run, ids, 11) > 1e-4))
print("open cells, requested and executed:", int(requested.sum()), int(executed.sum()))
