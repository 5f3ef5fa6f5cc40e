"""A decode row takes itself for row 0, and sees the first key alone."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, block_mask, causal


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def make_mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, *rest: Any, **facts: Any
    ) -> BlockMask:
        offset = int(q_offset) if repaired else 0
        return block_mask(causal, q_length, kv_length, offset=offset)

    setup.register_attention(causal, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.generate()
