"""The mask was made before the cache grew: it is one key short, and flex refuses it."""

from typing import Any

import kit
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache

PROMPT = 32

query = kit.numbers(1, 1, 1, 16)
short = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < PROMPT, None, None, 1, PROMPT, "cpu")
for n_keys in (PROMPT + 1, PROMPT - 1):
    keys = kit.numbers(1, 1, n_keys, 16, seed=1)
    try:
        flex_attention(query, keys, keys, block_mask=short)
        print(n_keys, "keys: accepted")
    except (ValueError, RuntimeError):
        print(n_keys, "keys: refused")


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    scale = kwargs["scaling"]
    out = flex_attention(query, key, value, block_mask=masks[-1], scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("short", attention)
model, input_ids = kit.tiny("short"), kit.ids(PROMPT, bos=True)
cache = DynamicCache(config=model.config)
masks = [kit.block_mask(kit.causal(PROMPT))]
input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
masks.append(short)
try:
    model(input_ids, past_key_values=cache)
    print("step 1: accepted")
except (ValueError, RuntimeError):
    held = [cache.get_seq_length(layer) for layer in range(2)]
    print("step 1: refused; the cache holds", held)
