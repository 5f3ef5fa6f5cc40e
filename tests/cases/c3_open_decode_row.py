"""Correct: the mask of a decode step is one row, and completely open."""

from typing import Any

import kit
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

opened: list[tuple[int, int, int]] = []


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    rows, keys = query.shape[2], key.shape[2]
    mask = create_block_mask(kit.mask_mod_up_to(keys - rows), None, None, rows, keys, "cpu")
    opened.append((rows, keys, rows * (keys - rows) + rows * (rows + 1) // 2))
    out = flex_attention(
        query, key, value, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


input_ids = kit.ids(6, bos=True)
plain = kit.tiny("eager").generate(input_ids, max_new_tokens=4, do_sample=False)
AttentionInterface.register("offset", attention)
mine = kit.tiny("offset").generate(input_ids, max_new_tokens=4, do_sample=False)
print("rows, keys and open cells per step:", opened[::2])
print("the same tokens as the plain model:", mine.tolist() == plain.tolist())
