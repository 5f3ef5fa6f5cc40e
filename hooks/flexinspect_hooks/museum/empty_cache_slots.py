"""A static cache has more slots than tokens, and the mask of a decode row is open over all."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import StaticCache

from flexinspect_hooks.museum.kit import NEW_TOKENS, Stage

SLOTS = 128


def additive(allowed: Tensor) -> Tensor:
    """Return cells (rows, slots) as a mask: 0 where open, the lowest float elsewhere."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, lowest)


def run(stage: Stage, *, repaired: bool) -> None:
    stage.model.set_attn_implementation("sdpa")
    cache = StaticCache(config=stage.model.config, max_cache_len=SLOTS)
    slots = torch.arange(SLOTS)[None]
    with stage.watched(segments=[], mask=None):
        fed, filled = stage.fed, 0
        for _ in range(NEW_TOKENS):
            rows = torch.arange(filled, filled + fed.shape[1])[:, None]
            is_decode = fed.shape[1] == 1
            allowed = slots < SLOTS if is_decode and not repaired else slots <= rows
            logits = stage.model(
                fed,
                attention_mask=additive(allowed),
                position_ids=rows.T,
                past_key_values=cache,
            ).logits
            filled += fed.shape[1]
            fed = torch.argmax(logits[:, -1:], -1)
