"""Every step feeds the whole sequence again, and each layer builds the same mask anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, attend, block_mask, causal

STEPS = 5


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def wasteful(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        mask = block_mask(causal, query.shape[2], key.shape[2])
        return attend(module, query, key, value, mask, **kwargs)

    setup.register_attention(causal, attend=None if repaired else wasteful)
    with setup.recorded(segments=[], mask=None):
        if repaired:
            setup.generate(max_new_tokens=STEPS)
            return
        fed = setup.input_ids
        for _ in range(STEPS):
            logits = setup.model(fed).logits
            fed = torch.cat([fed, torch.argmax(logits[:, -1:], -1)], 1)
