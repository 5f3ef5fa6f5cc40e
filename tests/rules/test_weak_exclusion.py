"""Float masks whose values are so near to 0 that the keys which they should exclude are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, DynamicCache

from flexinspect.records.finding import Severity

FINDING = "mask.weak-exclusion"
N, STEPS = 16, 3
SIZE = N + STEPS
LOWEST = torch.finfo(torch.float32).min
FUTURE = torch.full((SIZE, SIZE), -1e9).triu(1)
FIRST = (torch.arange(SIZE) >= 8)[:, None] & (torch.arange(SIZE) < 8)
"""Rows of the second segment, and keys of the first one."""
FIRST[:, 0] = False  # the BOS
DISTANCE = (torch.arange(SIZE)[:, None] - torch.arange(SIZE)).clamp(min=0).float()


def generate_under(model: Any, mask: Tensor) -> None:
    """Generate with a cache under a float mask (heads, SIZE, SIZE), or (SIZE, SIZE)."""
    mask = mask if mask.dim() == 3 else mask[None]
    cache, rows, n_keys = DynamicCache(), torch.tensor([ids(N, 3)]), N
    for _ in range(STEPS):
        part = mask[None, :, n_keys - rows.shape[1] : n_keys, :n_keys].to(model.dtype)
        out = model(rows, attention_mask=part, past_key_values=cache, use_cache=True)
        rows, n_keys = out.logits[:, -1:].argmax(-1), n_keys + 1


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Run a tiny model under a float mask and return the findings."""

    def go(mask: Tensor, backend: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        model = make_model("llama").to(dtype)
        model.set_attn_implementation(backend)
        return planted(tmp_path, model, lambda: generate_under(model, mask))

    return go


def segment_mask(value: float) -> Tensor:
    """Return a causal mask that adds a value where the second segment sees the first one."""
    return torch.where(FIRST, value, 0.0) + FUTURE


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("value", "share"), [(-1e-9, "100"), (-3.0, "4.98"), (-14.5, "5.04e-05")])
def test_a_value_that_excludes_no_key_is_named(
    run: Callable[..., Any], value: float, share: str, backend: str
) -> None:
    found = one(run(segment_mask(value), backend), FINDING)
    assert (found.severity, found.layers, found.step) == (Severity.WARNING, (0, 1, 2), 0)
    assert found.positions == (8, 1)
    assert found.sentence.startswith(
        f"All 3 layers: the float mask adds {value:g} to 56 cells, and 0 to the other open ones. "
        f"Only -inf, or a value like -1e9, excludes a key: these keys are read with {share} % of "
        "their weight; first: position 8 "
    )
    assert found.evidence["cells"] == 56


def test_a_mask_in_half_precision_is_named(run: Callable[..., Any]) -> None:
    assert one(run(segment_mask(-3.0), dtype=torch.bfloat16), FINDING).evidence["lowest"] == -3.0


def test_sums_of_values_near_to_0_are_named(run: Callable[..., Any]) -> None:
    """Padding and segments are excluded by one small value each, and both by their sum."""
    both = torch.where(torch.arange(SIZE) == 3, -1e-9, 0.0) + segment_mask(-1e-9)
    assert " adds -2e-09 to -1e-09 to " in one(run(both), FINDING).sentence


def test_a_decode_row_alone_is_named(run: Callable[..., Any]) -> None:
    mask = segment_mask(-1e9)
    mask[N:] = segment_mask(-1e-9)[N:]
    found = one(run(mask), FINDING)
    assert (found.step, found.positions, found.evidence["cells"]) == (1, (16, 1), 7)


@pytest.mark.parametrize("value", [-torch.inf, LOWEST, -1e9, -1e4, -100.0])
def test_a_value_that_excludes_keys_is_not_reported(run: Callable[..., Any], value: float) -> None:
    assert serious(run(segment_mask(value))) == []


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
BIASES = {
    "ALiBi": FUTURE - SLOPES * DISTANCE,
    "ALiBi of one head": FUTURE - 0.5 * DISTANCE,
    "buckets of distances": FUTURE - DISTANCE.log1p().floor(),
    "relative positions": FUTURE + torch.sin(DISTANCE),
    "keys with more weight": FUTURE + torch.where(FIRST, 0.7, 0.0),
    "more and less weight": FUTURE + torch.where(FIRST, -0.7, 0.7),
    "nothing added": FUTURE,
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_is_meant_is_not_reported(run: Callable[..., Any], name: str) -> None:
    assert of(run(BIASES[name]), FINDING) == []


def test_a_score_mod_is_not_reported(tmp_path: Path) -> None:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        offset = key.shape[2] - query.shape[2]

        def fewer(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            score = torch.where((q + offset >= 8) & (k < 8), score - 3.0, score)
            return torch.where(q + offset >= k, score, -torch.inf)

        out: Any = flex_attention(query, key, value, fewer, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("fewer", attention)
    model = make_model("llama")
    model.set_attn_implementation("fewer")
    found = planted(tmp_path, model, lambda: generate_under(model, segment_mask(0.0)))
    assert of(found, FINDING) == []
