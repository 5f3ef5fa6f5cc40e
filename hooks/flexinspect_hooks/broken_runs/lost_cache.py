"""A patched forward hands the cache on under the name that it had years ago."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from flexinspect_hooks.broken_runs.kit import NEW_TOKENS, BrokenRunSetup


def patch_attention(attention: Any, *, repaired: bool) -> None:
    """Patch an attention module to see what it is handed, as a logger does."""
    original = attention.forward

    def forward(hidden_states: Tensor, past_key_value: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.pop("past_key_values", None)
        cache = cache if repaired else past_key_value  # nobody calls it so any more: None
        return original(hidden_states, past_key_values=cache, **kwargs)

    attention.forward = forward


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    patch_attention(setup.model.model.layers[1].self_attn, repaired=repaired)
    cache = DynamicCache(config=setup.model.config)
    with setup.recorded(segments=[], mask=None):
        fed = setup.input_ids
        for _ in range(NEW_TOKENS):
            logits = setup.model(fed, past_key_values=cache, use_cache=True).logits
            fed = torch.argmax(logits[:, -1:], -1)
