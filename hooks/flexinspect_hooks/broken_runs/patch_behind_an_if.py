"""A patch adds the structure to the mask if there is one, and SDPA is given none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation


def patch_layer(layer: Any, closed: Tensor) -> None:
    """Let a decoder layer close these cells in the mask that it is handed."""
    original = layer.forward

    def forward(hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            attention_mask = attention_mask.masked_fill(closed, torch.finfo(torch.float32).min)
        return original(hidden_states, attention_mask=attention_mask, **kwargs)

    layer.forward = forward


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    n = len(setup.ids)
    rows, keys = torch.arange(n)[:, None], torch.arange(n)[None]
    closed = ~isolation(setup.spans)(rows, keys)
    setup.model.set_attn_implementation("eager" if repaired else "sdpa")
    for layer in setup.model.model.layers:
        patch_layer(layer, closed)
    with setup.recorded():
        setup.model(setup.input_ids, use_cache=False)
