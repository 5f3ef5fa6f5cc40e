"""Attention is registered under a name of its own, and no mask function under that name."""

from __future__ import annotations

from transformers import AttentionMaskInterface

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, causal


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    AttentionMaskInterface._global_mapping.pop(setup.name, None)
    setup.register_attention(causal, has_mask=repaired)
    with setup.recorded(segments=[], mask=None):
        setup.generate()
