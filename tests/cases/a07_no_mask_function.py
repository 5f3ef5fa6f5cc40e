"""An attention function is registered without a mask function: its layers get no mask at all."""

from typing import Any

import kit
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flex_attention_mask

received: list[str] = []


def mine(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    received.append(type(attention_mask).__name__)
    scale = kwargs["scaling"]
    out = flex_attention(query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


kit.flex_without_compiler()
AttentionInterface.register("mine", mine)
ids = kit.ids(10, bos=True)
for with_mask_function in (False, True):
    if with_mask_function:
        AttentionMaskInterface.register("mine", flex_attention_mask)
    rows = kit.rows_that(kit.moved(kit.logits_of(kit.tiny("mine")), ids, 9) > 1e-4)
    print(f"mask received: {received[-1]}; rows that touching the LAST token moves: {rows}")
