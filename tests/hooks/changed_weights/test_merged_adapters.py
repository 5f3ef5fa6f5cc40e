"""Adapters made by hand that are merged and still active are named, others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import make_model
from torch import Tensor, nn

from flexinspect.rules.numerics.weight_sentences import describe_twice
from flexinspect_hooks.changed_weights.made_weights import MadeWeights


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 3; a true `is_merged` switches the adapter off."""

    def __init__(self, base: nn.Linear, *, knows_merge: bool = False) -> None:
        super().__init__()
        self.base, self.knows_merge, self.is_merged = base, knows_merge, False
        self.down = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 3) * 0.1)

    def forward(self, x: Tensor) -> Any:
        if self.knows_merge and self.is_merged:
            return self.base(x)
        return self.base(x) + 2 * (x @ self.down.T @ self.up.T)

    @torch.no_grad()
    def merge(self, size: float = 2.0) -> nn.Linear:
        self.base.weight += size * (self.up @ self.down)
        self.is_merged = True
        return self.base


def adapted(*, knows_merge: bool = False) -> tuple[Any, list[Adapted]]:
    torch.manual_seed(0)
    model = make_model("llama")
    modules = []
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            module = Adapted(getattr(layer.self_attn, name), knows_merge=knows_merge)
            setattr(layer.self_attn, name, module)
            modules.append(module)
    return model, modules


def twice(made: MadeWeights, model: Any) -> list[dict[str, Any]]:
    facts = made.changed(model) or {}
    found: list[dict[str, Any]] = facts.get("twice", [])
    return found


def test_an_adapter_that_is_merged_and_still_adds_its_product_is_named(made: MadeWeights) -> None:
    model, _ = adapted()
    for layer in model.model.layers:
        layer.self_attn.q_proj = layer.self_attn.q_proj.merge()  # as it should be
        layer.self_attn.v_proj.merge()
    (found,) = twice(made, model)
    layers = list(range(len(model.model.layers)))
    assert (found["name"], found["layers"]) == ("model.layers.*.self_attn.v_proj", layers)
    assert found["names"][0] == "model.layers.0.self_attn.v_proj.weight"
    assert "v_proj (Adapted) of layers 0-" in describe_twice(found)


def test_modules_that_skip_a_merged_adapter_are_left_alone(made: MadeWeights) -> None:
    model, modules = adapted(knows_merge=True)
    for module in modules:
        module.merge()
    assert twice(made, model) == []


def test_adapters_beside_unmerged_or_otherwise_changed_weights_are_left_alone(
    made: MadeWeights,
) -> None:
    model, modules = adapted()
    assert twice(made, model) == []
    with torch.no_grad():
        for module in modules:
            other = torch.randn(3, module.base.in_features)
            module.base.weight += torch.randn(module.base.out_features, 3) @ other
    assert twice(made, model) == []


class Switched(nn.Module):
    """A linear layer with named adapters in a dict, of which one may be active."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.active = base, ""
        shapes = ((3, base.in_features), (base.out_features, 3))
        self.adapters = {name: [torch.randn(one) * 0.1 for one in shapes] for name in ("a", "b")}

    def forward(self, x: Tensor) -> Any:
        if not self.active:
            return self.base(x)
        down, up = self.adapters[self.active]
        return self.base(x) + 2 * (x @ down.T @ up.T)

    @torch.no_grad()
    def merge(self, name: str) -> None:
        down, up = self.adapters[name]
        self.base.weight += 2 * (up @ down)


@pytest.mark.parametrize(("active", "is_twice"), [("a", True), ("b", False), ("", False)])
def test_an_adapter_that_is_no_parameter_is_named_if_it_counts_twice(
    made: MadeWeights, active: str, is_twice: bool
) -> None:
    torch.manual_seed(0)
    model = make_model("llama")
    for layer in model.model.layers:
        module = layer.self_attn.o_proj = Switched(layer.self_attn.o_proj)
        module.merge("a")
        module.active = active
    found = twice(made, model)
    assert [one["name"] for one in found] == ["model.layers.*.self_attn.o_proj"] * is_twice
