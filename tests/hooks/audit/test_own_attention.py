"""Attention written by hand: the order of soft cap and mask, and mixed layouts of RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor

from flexinspect.rules.numerics.audit_findings import REPRODUCED, UNEXPLAINED


def capped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, over_mask: bool
) -> tuple[Tensor, None]:
    """Attend with a soft cap of 4, before or after the mask is added."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * module.scaling
    if over_mask:
        scores = 4.0 * ((scores + mask) / 4.0).tanh()
    else:
        scores = 4.0 * (scores / 4.0).tanh() + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.mark.parametrize("over_mask", [True, False])
def test_a_soft_cap_over_the_mask_is_named(
    audit: Audit, monkeypatch: pytest.MonkeyPatch, over_mask: bool
) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    model = make_model("gemma2", attn_logit_softcapping=4.0)
    model.set_attn_implementation("eager")

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        return capped(module, q, k, v, mask, over_mask=over_mask)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_gemma2, "eager_attention_forward", attend)
        _, findings, _ = audit(model, lambda: decode(model))
    named = [one for one in findings if one.id == REPRODUCED]
    assert len(named) == len(findings) == over_mask
    assert all("capped after the mask is added" in one.sentence for one in named)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_neighbours_turned_by_the_angles_of_halves_are_named_also_beside_another_scale(
    audit: Audit, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    from transformers.models.llama import modeling_llama

    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling *= factor  # meant, but undeclared

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
        _, (finding, *_), _ = audit(model, lambda: decode(model))
    assert "that pairs neighbouring dimensions, by the angles of halves" in finding.sentence
    if factor == 1:
        assert finding.id == REPRODUCED
    elif finding.id == UNEXPLAINED:
        assert "the attention over them differs, too" in finding.sentence
