"""A mask of bools goes to eager attention, which adds it to the scores: True is 1, False is 0."""

from __future__ import annotations

import torch

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    n = len(setup.ids)
    rows, keys = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = isolation(setup.spans)(rows, keys)[None, None]
    if repaired:
        lowest = torch.finfo(torch.float32).min
        allowed = torch.zeros(1, 1, n, n).masked_fill(~allowed, lowest)
    setup.model.set_attn_implementation("eager")
    with setup.recorded():
        setup.model(setup.input_ids, attention_mask=allowed, use_cache=False)
