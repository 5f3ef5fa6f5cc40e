"""The mask of a decode step counts its row from 0: the new token sees only the first key."""

from typing import Any

import kit
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache

PROMPT = 9

query = kit.numbers(1, 2, 1, 16, seed=1)
key, value = (kit.numbers(1, 2, PROMPT, 16, seed=seed) for seed in (2, 3))
reference = F.scaled_dot_product_attention(query, key, value)
for offset in (0, PROMPT - 1):
    mask = create_block_mask(kit.mask_mod_up_to(offset), None, None, 1, PROMPT, "cpu")
    out = flex_attention(query, key, value, block_mask=mask)
    is_right = torch.allclose(out, reference, atol=1e-4)
    copies = torch.allclose(out[0, :, 0], value[0, :, 0], atol=1e-5)
    print(f"offset {offset}: right: {is_right}; equals the first value: {copies}")

seen: list[int] = []


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    lengths = (query.shape[2], key.shape[2])
    offset = lengths[1] - lengths[0] if with_offset else 0
    mask = create_block_mask(kit.mask_mod_up_to(offset), None, None, *lengths, "cpu")
    seen.append(min(lengths[1], lengths[0] + offset))
    out = flex_attention(
        query, key, value, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("decoding", attention)
model, prompt = kit.tiny("decoding"), kit.ids(PROMPT, bos=True)
answers: list[list[int]] = []
for with_offset in (False, True):
    cache, input_ids, answer = DynamicCache(config=model.config), prompt, []
    seen.clear()
    for _ in range(4):
        input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        answer.append(int(input_ids))
    print(f"with offset: {with_offset}; keys the newest row sees, step by step: {seen[::2]}")
    answers.append(answer)
print("tokens that are the same:", sum(a == b for a, b in zip(*answers, strict=True)), "of 4")
