"""The whole sequence again at each step, and an equal mask built anew in each layer."""

from typing import Any

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

LAYERS, PROMPT, NEW = 4, 10, 5

built: list[int] = []


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    lengths = (query.shape[2], key.shape[2])
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, 1, 4, *lengths, "cpu")
    built.append(lengths[0])
    out = flex_attention(
        query, key, value, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("no_cache", attention)
model, input_ids = kit.tiny("no_cache", layers=LAYERS), kit.ids(PROMPT, bos=True)
for _ in range(NEW):
    token = model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
    input_ids = torch.cat([input_ids, token], 1)
print("masks built:", len(built), "for", NEW, "tokens")
print("query rows computed:", sum(built[::LAYERS]), "needed with a cache:", PROMPT + NEW - 1)
