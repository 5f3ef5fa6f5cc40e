"""Rotary modules of the program: their tables are taken as they are, and checked."""

from __future__ import annotations

from typing import Any

import torch
from support.audits import Audit, decode
from support.tiny import ids, make_model
from torch import Tensor, nn

from flexinspect.rules.numerics.audit_findings import REPRODUCED, UNEXPLAINED

TAKEN = "the rotary module model.rotary_emb (Interpolated) is taken as it is"


class Interpolated(nn.Module):
    """Position interpolation, of position ids in the dtype of the hidden states or in another."""

    def __init__(self, size: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.frequencies = 500.0 ** -(torch.arange(0, size, 2) / size)
        self.dtype = dtype

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        places = position_ids.to(self.dtype or x.dtype)[..., None] / 2
        angles = places * self.frequencies.to(places.dtype)
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def replaced(dtype: torch.dtype | None) -> Any:
    model = make_model("llama", max_position_embeddings=1024)
    model.model.rotary_emb = Interpolated(model.config.head_dim, dtype)
    return model


def long_prompt(model: Any) -> None:
    model(torch.tensor([ids(300, 3)]), use_cache=True)


def test_a_rotary_module_of_the_program_is_taken_as_it_is(audit: Audit) -> None:
    model = replaced(torch.float32)
    (verdict,), findings, _ = audit(model, lambda: decode(model))
    assert findings == []
    assert verdict.divergence is None
    assert TAKEN in verdict.notes


def test_one_in_bfloat16_is_right_with_exact_angles(audit: Audit) -> None:
    model = replaced(torch.float32).to(torch.bfloat16)
    (verdict,), findings, _ = audit(model, lambda: long_prompt(model))
    assert findings == []
    assert TAKEN in verdict.notes


def test_one_that_rounds_position_ids_is_named(audit: Audit) -> None:
    model = replaced(None).to(torch.bfloat16)
    _, (found,), _ = audit(model, lambda: long_prompt(model))
    assert found.id == REPRODUCED
    assert "the angles that model.rotary_emb (Interpolated) computes in bfloat16" in found.sentence


def test_angles_that_are_not_proportional_are_not_taken(audit: Audit) -> None:
    model = replaced(torch.float16)
    _, (found,), _ = audit(model, lambda: long_prompt(model))
    assert found.id == UNEXPLAINED
    assert "model.rotary_emb" in found.sentence


def test_what_else_is_wrong_is_named(audit: Audit) -> None:
    model = replaced(torch.float32)
    model.model.layers[1].self_attn.scaling *= 2
    (verdict,), (found,), _ = audit(model, lambda: decode(model))
    assert found.layer == 1
    assert "self_attn.scaling is" in found.sentence
    assert TAKEN in verdict.notes
