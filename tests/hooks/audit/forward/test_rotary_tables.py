"""Rotary tables of other positions, bases and layers are those of the architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import make_model
from torch import Tensor

from flexinspect_hooks.audit.forward.rotary_tables import RotaryTables, frequencies_of, kind_names

GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LATER = torch.tensor([[7, 19, 40]])


def made(model: Any, positions: Tensor, *kind: str) -> tuple[Tensor, Tensor]:
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    cos, sin = rotary(torch.zeros(1), positions, *kind)
    return cos, sin


def tables_of(model: Any, *kind: str) -> RotaryTables:
    positions = torch.arange(12)[None]
    return RotaryTables(model, *made(model, positions, *kind), positions)


def close(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 64}}),
        ("gpt_neox", {}),
        ("cohere", {}),
    ],
)
def test_tables_of_other_positions_are_those_of_the_architecture(
    family: str, options: dict[str, Any]
) -> None:
    model = make_model(family, **options)
    assert close(tables_of(model)(LATER), made(model, LATER))
    assert not kind_names(model)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_a_layer_type_keeps_its_own_frequencies_at_other_positions(kind: str) -> None:
    model = make_model("gemma3_text", **GEMMA)
    tables = tables_of(model, kind)
    assert close(tables(LATER), made(model, LATER, kind))
    assert close(tables.of_kind(kind), made(model, torch.arange(12)[None], kind))
    (other,) = {"sliding_attention", "full_attention"} - {kind}
    assert close(tables.of_kind(other), made(model, torch.arange(12)[None], other))
    assert not close(tables.of_kind(other), tables.of_kind(kind))


def test_the_frequencies_of_a_layer_are_those_of_its_type() -> None:
    model = make_model("gemma3_text", **GEMMA)
    assert kind_names(model) == ["full_attention", "sliding_attention"]
    found = [frequencies_of(model, layer) for layer in range(3)]
    names = [one.name for one in found if one is not None]
    assert names == ["sliding_attention", "full_attention", "sliding_attention"]


def test_tables_that_no_frequencies_give_do_not_change() -> None:
    model = make_model("llama")
    odd = torch.rand(1, 12, 12), torch.rand(1, 12, 12)
    tables = RotaryTables(model, *odd, torch.arange(12)[None])
    assert close(tables(LATER), odd)


def test_types_with_equal_tables_are_no_types_of_their_own() -> None:
    same = {"rope_type": "default", "rope_theta": 1e4}
    parameters = {"sliding_attention": same, "full_attention": same}
    assert not kind_names(make_model("gemma3_text", **GEMMA, rope_parameters=parameters))
