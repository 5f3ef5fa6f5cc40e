"""Weights of a layer whose rows and columns are in orders that do not fit together are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import make_model
from torch import Tensor

from flexinspect_hooks.changed_weights.made_weights import MadeWeights

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
WIDE = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
}


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))


def orders(made: MadeWeights, model: Any) -> list[dict[str, Any]]:
    facts = made.changed(model)
    assert facts is not None
    found: list[dict[str, Any]] = facts["orders"]
    return found


@torch.no_grad()
def take(weight: Any, order: Tensor, dim: int = 0) -> None:
    weight.copy_(weight.index_select(dim, order))


def heads_of(order: Tensor, size: int) -> Tensor:
    return (order[:, None] * size + torch.arange(size)).flatten()


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 96, "intermediate_size": 256}])
@pytest.mark.parametrize("broken", ["", "inverse", "forgotten", "half"])
def test_a_router_that_does_not_follow_its_experts_is_named(
    made: MadeWeights, broken: str, sizes: dict[str, int]
) -> None:
    model = make_model("mixtral", **EXPERTS, **sizes)
    moe, order = model.model.layers[1].mlp, torch.tensor([6, 4, 7, 2, 5, 0, 3, 1])
    take(moe.experts.gate_up_proj, order)
    if broken != "half":
        take(moe.experts.down_proj, order)
    if broken != "forgotten":
        take(moe.gate.weight, order.argsort() if broken == "inverse" else order)
    found = orders(made, model)
    assert [(one["kind"], one["path"]) for one in found] == (
        [("experts", "model.layers.1.mlp")] if broken else []
    )
    if broken == "inverse":
        (facts,) = found
        assert facts["is_inverse"]
        told = {name: side["order"] for side in facts["sides"] for name in side["names"]}
        assert told["model.layers.1.mlp.experts.down_proj"] == order.tolist()
        assert told["model.layers.1.mlp.gate.weight"] == order.argsort().tolist()


# -- neurons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, WIDE])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("broken", [True, False])
def test_neurons_that_are_renumbered_on_one_side_only_are_named(
    made: MadeWeights, family: str, sizes: dict[str, int], broken: bool
) -> None:
    model = make_model(family, **sizes)
    if family in ("llama", "phi3"):
        mlp = model.model.layers[1].mlp
        order = shuffled(mlp.down_proj.weight.shape[1])
        down: tuple[Any, int] = (mlp.down_proj.weight, 1)
        if family == "phi3":
            take(mlp.gate_up_proj.weight, torch.cat([order, order + len(order)]))
        else:
            take(mlp.gate_proj.weight, order)
            take(mlp.up_proj.weight, order)
    elif family == "gpt2":
        mlp = model.transformer.h[1].mlp
        order, down = shuffled(len(mlp.c_proj.weight)), (mlp.c_proj.weight, 0)
        take(mlp.c_fc.weight, order, 1)
    else:
        mlp = model.gpt_neox.layers[1].mlp
        down = (mlp.dense_4h_to_h.weight, 1)
        order = shuffled(down[0].shape[1])
        take(mlp.dense_h_to_4h.weight, order)
    take(down[0], order.argsort() if broken else order, down[1])
    found = orders(made, model)
    assert [one["kind"] for one in found] == (["neurons"] if broken else [])


def test_gates_and_neurons_that_changed_places_are_named(made: MadeWeights) -> None:
    model = make_model("phi3")
    take(model.model.layers[0].mlp.gate_up_proj.weight, torch.arange(192).roll(96))
    (facts,) = orders(made, model)
    assert facts["kind"] == "neurons"


# -- heads -----------------------------------------------------------------------------------------

KEYS = torch.tensor([1, 0])
QUERIES = torch.tensor([3, 2, 0, 1])  # the heads of each key stay together


@pytest.mark.parametrize(
    ("left_out", "kinds"),
    [
        ("", []),
        ("q", ["rows of heads", "heads"]),
        ("k", ["rows of heads", "heads"]),
        ("v", ["rows of heads", "heads"]),
        ("o", ["rows of heads", "heads"]),
    ],
)
def test_heads_that_are_renumbered_in_some_projections_are_named(
    made: MadeWeights, left_out: str, kinds: list[str]
) -> None:
    model = make_model("llama")
    attention = model.model.layers[2].self_attn
    queries, keys = heads_of(QUERIES, 12), heads_of(KEYS, 12)
    orders_of = {"q": (queries, 0), "k": (keys, 0), "v": (keys, 0), "o": (queries, 1)}
    for name, (order, dim) in orders_of.items():
        if name != left_out:
            take(attention.get_submodule(f"{name}_proj").weight, order, dim)
    found = orders(made, model)
    assert {one["kind"] for one in found} == set(kinds)
    assert all(one["path"] == "model.layers.2.self_attn" for one in found)


def test_dimensions_of_heads_are_renumbered_in_values_and_outputs(made: MadeWeights) -> None:
    model = make_model("llama")
    attention, order = model.model.layers[0].self_attn, shuffled(12)
    take(attention.v_proj.weight, torch.cat([order, order + 12]))
    take(attention.o_proj.weight, torch.cat([order + 12 * n for n in range(4)]), 1)
    assert not orders(made, model)
    take(attention.v_proj.weight, torch.cat([order, order + 12]))
    assert [one["kind"] for one in orders(made, model)] == ["rows of heads"]


@pytest.mark.parametrize("broken", [True, False])
def test_heads_of_a_fused_projection(made: MadeWeights, broken: bool) -> None:
    model = make_model("gpt2")
    attention, order = model.transformer.h[0].attn, heads_of(torch.tensor([2, 0, 3, 1]), 12)
    blocks = [order, order + 48, (order.argsort() if broken else order) + 96]
    take(attention.c_attn.weight, torch.cat(blocks), 1)
    take(attention.c_proj.weight, order)
    assert bool(orders(made, model)) is broken


# -- channels and tokens ---------------------------------------------------------------------------


def test_inputs_of_one_projection_in_another_order_are_named(made: MadeWeights) -> None:
    model = make_model("llama")
    take(
        model.model.layers[1].self_attn.k_proj.weight,
        torch.arange(48).view(-1, 2).flip(1).flatten(),
        1,
    )
    (facts,) = orders(made, model)
    assert facts["kind"] == "channels"
    first = facts["sides"][0]
    assert first["names"] == ["the inputs of model.layers.1.self_attn.k_proj.weight"]
    assert first["order"][:4] == [1, 0, 3, 2]


def test_channels_that_are_renumbered_everywhere_are_right(made: MadeWeights) -> None:
    model, order = make_model("llama"), shuffled(48)
    take(model.model.embed_tokens.weight, order, 1)
    take(model.lm_head.weight, order, 1)
    for layer in model.model.layers:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            take(layer.get_submodule(name).weight, order, 1)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            take(layer.get_submodule(name).weight, order, 1)
        take(layer.self_attn.o_proj.weight, order)
        take(layer.mlp.down_proj.weight, order)
    assert not orders(made, model)


@pytest.mark.parametrize("broken", [True, False])
def test_a_vocabulary_that_is_renumbered_in_the_embeddings_alone_is_named(
    made: MadeWeights, broken: bool
) -> None:
    model, order = make_model("llama"), shuffled(300)
    take(model.model.embed_tokens.weight, order)
    if not broken:
        take(model.lm_head.weight, order)
    assert [one["kind"] for one in orders(made, model)] == (["tokens"] if broken else [])


# -- what is no order ------------------------------------------------------------------------------


@torch.no_grad()
def add_adapter(model: Any) -> None:
    torch.manual_seed(1)
    model.model.layers[0].mlp.up_proj.weight += 0.3 * torch.randn(96, 2) @ torch.randn(2, 48)


@torch.no_grad()
def make_anew(model: Any) -> None:
    for one in model.parameters():
        one.normal_()


@torch.no_grad()
def copy_a_head(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight[12:24] = weight[:12]


@torch.no_grad()
def prune(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight[::2] = 0


@torch.no_grad()
def round_to_4_bits(model: Any) -> None:
    for one in model.parameters():
        if one.dim() == 2:
            scale = one.abs().amax(1, keepdim=True).clamp_min(1e-9) / 7
            one.copy_((one / scale).round() * scale)


@torch.no_grad()
def change_tokens(model: Any) -> None:
    model.model.embed_tokens.weight[7] = model.model.embed_tokens.weight.mean(0)


NO_ORDERS = [add_adapter, make_anew, copy_a_head, prune, round_to_4_bits, change_tokens]


@pytest.mark.parametrize("change", NO_ORDERS)
def test_other_changes_are_no_orders(made: MadeWeights, change: Callable[[Any], None]) -> None:
    model = make_model("llama")
    change(model)
    assert not orders(made, model)


def test_a_projection_with_a_hook_that_orders_its_inputs_is_not_judged(made: MadeWeights) -> None:
    model, order = make_model("llama"), shuffled(48)
    projection = model.model.layers[1].self_attn.q_proj
    take(projection.weight, order, 1)
    projection.register_forward_pre_hook(lambda _, args: (args[0][..., order],))
    assert not orders(made, model)
