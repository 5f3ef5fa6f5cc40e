"""A static cache has more slots than tokens, and the mask of a decode row is open over all."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import StaticCache

from flexinspect_hooks.broken_runs.kit import NEW_TOKENS, BrokenRunSetup

SLOTS = 128


def additive_mask(allowed: Tensor) -> Tensor:
    """Return cells (rows, slots) as a mask: 0 where open, the lowest float elsewhere."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, lowest)


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    setup.model.set_attn_implementation("sdpa")
    cache = StaticCache(config=setup.model.config, max_cache_len=SLOTS)
    slots = torch.arange(SLOTS)[None]
    with setup.recorded(segments=[], mask=None):
        fed, filled = setup.input_ids, 0
        for _ in range(NEW_TOKENS):
            rows = torch.arange(filled, filled + fed.shape[1])[:, None]
            is_decode = fed.shape[1] == 1
            allowed = slots < SLOTS if is_decode and not repaired else slots <= rows
            logits = setup.model(
                fed,
                attention_mask=additive_mask(allowed),
                position_ids=rows.T,
                past_key_values=cache,
            ).logits
            filled += fed.shape[1]
            fed = torch.argmax(logits[:, -1:], -1)
