"""The rule of each decode step is new code, so no graph that was compiled before fits it."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, block_mask, causal

STEPS = 8


def generated_mask_mod(offset: int) -> Any:
    """Return a rule that is written and compiled by Python for one offset."""
    made: dict[str, Any] = {}
    exec(f"def mask_mod(b, h, q_idx, kv_idx): return kv_idx <= q_idx + {offset}", made)
    return made["mask_mod"]


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def make_mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, *rest: Any, **facts: Any
    ) -> BlockMask:
        if repaired:
            return block_mask(causal, q_length, kv_length, offset=int(q_offset))
        rule = generated_mask_mod(int(q_offset))
        return create_block_mask(rule, None, None, q_length, kv_length, device="cpu")

    setup.register_attention(causal, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.generate(max_new_tokens=STEPS)
