"""RoPE in bfloat16 or float16: the audit says what is rounded, and passes tables in the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor, nn

from flexinspect.rules.numerics.audit_findings import REPRODUCED

BF16, FP16 = torch.bfloat16, torch.float16
AnglesOf = Callable[[Tensor, Tensor], Tensor]


class Rotary(nn.Module):
    """A rotary embedding of a program: `angles_of` takes positions (1, rows, 1) and frequencies."""

    def __init__(self, frequencies: Tensor, angles_of: AnglesOf) -> None:
        super().__init__()
        self.frequencies = frequencies.float()
        self.angles_of = angles_of

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles_of(position_ids[..., None], self.frequencies)
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Convert the weights, but not the frequencies, as `from_pretrained` does."""
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = frequencies
    return model


def run(audit: Audit, model: Any, angles_of: AnglesOf, n: int) -> Any:
    exact = model.model.rotary_emb.inv_freq.float()
    model.model.rotary_emb = Rotary(exact, angles_of)
    rows = torch.tensor([ids(n, 3)])

    def program() -> None:
        past = None
        now = rows
        for _ in range(3):
            output = model(now, past_key_values=past, use_cache=True)
            past, now = output.past_key_values, output.logits[:, -1:].argmax(-1)

    return audit(model, program)


CASES: list[tuple[torch.dtype, AnglesOf, int, str]] = [
    (BF16, lambda p, f: p.to(BF16) * f, 300, "position ids rounded to bfloat16, which is exact"),
    (BF16, lambda p, f: p.to(BF16) * f.to(BF16), 300, "computed in bfloat16, to which position"),
    (
        torch.float32,
        lambda p, f: p * f.to(BF16).float(),
        60,
        "frequencies of RoPE rounded to bfloat16",
    ),
    (torch.float32, lambda p, f: (p * f).to(BF16), 60, "angles of RoPE rounded to bfloat16"),
    (torch.float32, lambda p, f: p.to(FP16) * f.to(FP16), 60, "RoPE computed in float16"),
    (torch.float32, lambda p, f: (p * f).to(FP16), 60, "angles of RoPE rounded to float16"),
    (torch.float32, lambda p, f: (p * f).to(FP16).float(), 60, "of RoPE rounded to float16"),
]


@pytest.mark.parametrize(("dtype", "angles_of", "n", "words"), CASES)
def test_what_is_rounded_in_rope_is_named(
    audit: Audit, dtype: torch.dtype, angles_of: AnglesOf, n: int, words: str
) -> None:
    model = make_model("llama", max_position_embeddings=512)
    model = in_dtype(model, dtype)
    _, (found,), _ = run(audit, model, angles_of, n)
    assert found.id == REPRODUCED, found.sentence
    assert words in found.sentence


def test_experts_between_which_rounding_decides_do_not_hide_what_is_rounded(audit: Audit) -> None:
    model = make_model(
        "mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )
    model = in_dtype(model, BF16)
    _, (found,), _ = run(audit, model, lambda p, f: p.to(BF16) * f, 300)
    assert found.id == REPRODUCED, found.sentence
    assert "position ids rounded to bfloat16" in found.sentence


@pytest.mark.parametrize(
    "angles_of",
    [
        lambda p, f: p * f,
        lambda p, f: (p.double() * f.double()).float(),
        lambda p, f: p.to(FP16).float() * f,  # position ids below 2048 are exact in float16
    ],
)
def test_tables_that_only_have_the_dtype_of_the_model_agree(
    audit: Audit, angles_of: AnglesOf
) -> None:
    model = make_model("llama", max_position_embeddings=512)
    model = in_dtype(model, BF16)
    verdicts, findings, _ = run(audit, model, angles_of, 300)
    assert not findings
    assert [one.divergence for one in verdicts] == [None]


def test_tables_without_the_factor_of_yarn_are_named(audit: Audit) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
    model = make_model(
        "llama",
        rope_parameters=yarn | {"original_max_position_embeddings": 64},
        max_position_embeddings=512,
    )
    _, (found,), _ = run(audit, model, lambda p, f: p * f, 60)
    assert found.id == REPRODUCED, found.sentence
    assert "lack the factor attention_scaling (1.208)" in found.sentence
