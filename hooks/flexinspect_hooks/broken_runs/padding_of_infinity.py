"""Rows of padding are closed with minus infinity: softmax over nothing but that is NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, causal

PADDING = 3


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    value = torch.finfo(torch.float32).min if repaired else -torch.inf

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *rest: Any,
        attention_mask: Tensor,
        **facts: Any,
    ) -> Tensor:
        rows, keys = torch.arange(q_length)[:, None], torch.arange(kv_length)[None]
        closed = (keys > rows) | ~attention_mask.bool()[:, None, None]
        return torch.zeros(closed.shape).masked_fill(closed, value)

    setup.register_attention(causal, attend=eager_attention_forward, make_mask=make_mask)
    fed = torch.tensor([[int(setup.tokenizer.pad_token_id)] * PADDING + setup.ids])
    real = (torch.arange(fed.shape[1]) >= PADDING).long()[None]
    with setup.recorded(segments=[], mask=None):
        setup.model(fed, attention_mask=real, use_cache=False)
