"""The mask is built for each sequence and head, though its rule looks at neither."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, attend, block_mask, causal

LENGTH, SEQUENCES = 1000, 2


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    heads = int(setup.model.config.num_attention_heads)
    fed = torch.tensor([(setup.ids * (LENGTH // len(setup.ids) + 1))[:LENGTH]] * SEQUENCES)

    def make_mask(batch_size: int, q_length: int, kv_length: int, *rest: Any, **facts: Any) -> Any:
        if repaired:
            return block_mask(causal, q_length, kv_length)
        rule = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx  # noqa: E731
        return create_block_mask(rule, batch_size, heads, q_length, kv_length, device="cpu")

    setup.register_attention(causal, attend=attend, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.model(fed, use_cache=False)
