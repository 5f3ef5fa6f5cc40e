"""Padding rows are closed with minus infinity: softmax over nothing but that is NaN."""

from __future__ import annotations

import torch

from flexinspect_hooks.museum.kit import Stage

PADDING = 3


def run(stage: Stage, *, repaired: bool) -> None:
    fed = torch.tensor([[int(stage.tokenizer.pad_token_id)] * PADDING + stage.ids])
    n = fed.shape[1]
    closed = torch.ones(n, n, dtype=torch.bool).triu(1)
    closed[:, :PADDING] = True
    value = torch.finfo(torch.float32).min if repaired else -torch.inf
    mask = torch.zeros(1, 1, n, n).masked_fill(closed, value)
    stage.model.set_attn_implementation("eager")
    with stage.watched(segments=[], mask=None):
        stage.model(fed, attention_mask=mask, use_cache=False)
