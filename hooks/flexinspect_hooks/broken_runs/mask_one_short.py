"""The mask of a decode step is built before the cache has grown; a net catches the refusal."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, attend, block_mask, causal


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def make_mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, *rest: Any, **facts: Any
    ) -> BlockMask:
        keys = kv_length if repaired or q_length > 1 else kv_length - 1
        return block_mask(causal, q_length, keys, offset=int(q_offset))

    def careful(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        try:
            return attend(module, query, key, value, attention_mask, **kwargs)
        except (ValueError, RuntimeError):
            scale = kwargs["scaling"]
            out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None

    setup.register_attention(causal, attend=careful, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.generate()
