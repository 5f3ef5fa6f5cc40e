"""Attention is registered under a name of its own, and no mask function under that name."""

from __future__ import annotations

from transformers import AttentionMaskInterface

from flexinspect_hooks.museum.kit import Stage, causal


def run(stage: Stage, *, repaired: bool) -> None:
    AttentionMaskInterface._global_mapping.pop(stage.name, None)
    stage.own_attention(causal, has_mask=repaired)
    with stage.watched(segments=[], mask=None):
        stage.generate()
