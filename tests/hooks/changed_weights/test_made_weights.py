"""Weights that a program changes after it made a model are compared between layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.tiny import make_model
from torch import nn

from flexinspect.rules.numerics.changed_weights import uneven_layer
from flexinspect_hooks.changed_weights.made_weights import MadeWeights


def merge(model: nn.Module, layers: tuple[int, ...]) -> None:
    """Add a matrix of rank 2 to the query projection of layers, in place."""
    torch.manual_seed(0)
    pairs = {layer: (torch.randn(48, 2), torch.randn(2, 48)) for layer in sorted(set(layers))}
    with torch.no_grad():
        for layer in layers:
            weight = model.get_submodule(f"model.layers.{layer}.self_attn.q_proj").weight
            weight += 0.05 * pairs[layer][0] @ pairs[layer][1]  # type: ignore[operator]


def test_a_model_that_nobody_changed_has_no_facts(made: MadeWeights) -> None:
    assert made.changed(make_model("llama")) is None


def test_a_merge_has_its_layers_and_its_rank_and_is_reported_once(made: MadeWeights) -> None:
    model = make_model("llama")
    merge(model, (0, 1, 2))
    facts = made.changed(model)
    assert facts is not None
    (group,) = facts["groups"]
    assert group["name"] == "model.layers.*.self_attn.q_proj.weight"
    assert [(one["layer"], one["rank"], one["writes"]) for one in group["parameters"]] == [
        (0, 2, 1),
        (1, 2, 1),
        (2, 2, 1),
    ]
    assert uneven_layer(group["parameters"]) is None
    assert made.changed(model) is None


def test_large_weights_of_a_model_in_bfloat16_are_kept(made: MadeWeights) -> None:
    model = make_model("llama", vocab_size=4096, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight += 1
    facts = made.changed(model)
    assert facts is not None
    assert [one["name"] for one in facts["groups"]] == ["lm_head.weight"]


def test_a_layer_that_is_merged_twice_is_uneven(made: MadeWeights) -> None:
    model = make_model("llama")
    merge(model, (0, 1, 1, 2))
    facts = made.changed(model)
    assert facts is not None
    found = uneven_layer(facts["groups"][0]["parameters"])
    assert found is not None
    assert found[0] == 1
    assert "was written to twice, each other layer once" in found[1]


def test_a_parameter_that_an_adapter_holds_is_compared_under_its_first_name(
    made: MadeWeights,
) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    with torch.no_grad():
        attention.q_proj[0].weight += 1
    facts = made.changed(model)
    assert facts is not None
    assert facts["groups"][0]["name"] == "model.layers.*.self_attn.q_proj.weight"


def _change(layer: int, change: float, rank: int = 4, writes: int = 0) -> dict[str, float]:
    return {"layer": layer, "change": change, "rank": rank, "writes": writes}


def test_a_change_that_is_twice_as_large_or_of_another_rank_is_uneven() -> None:
    even = [_change(layer, 0.1 + 0.001 * layer) for layer in range(4)]
    assert uneven_layer(even) is None
    found = uneven_layer([*even, _change(4, 0.2)])
    assert found is not None
    assert found[0] == 4
    assert "its change is 2 times that of the others" in found[1]
    found = uneven_layer([*even, _change(4, 0.1, rank=8)])
    assert found == (4, "the change of layer 4 has rank 8, that of the others rank 4")


def test_layers_that_differ_anyway_and_two_layers_are_not_judged() -> None:
    assert uneven_layer([_change(0, 0.1), _change(1, 0.15), _change(2, 0.3)]) is None
    assert uneven_layer([_change(0, 0.1), _change(1, 0.3)]) is None


def test_weights_that_are_initialised_with_another_norm_in_each_layer_are_not_uneven(
    made: MadeWeights,
) -> None:
    model = make_model("llama", num_hidden_layers=4)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer, size in enumerate((1.0, 1.1, 1.05, 2.1)):
            weight = model.model.layers[layer].self_attn.o_proj.weight
            weight.normal_(0, 0.1 * size)
            if layer == 3:
                weight.mul_(1.5)
    facts = made.changed(model)
    assert facts is not None
    (group,) = facts["groups"]
    assert {one["rank"] for one in group["parameters"]} == {0}
    assert uneven_layer(group["parameters"]) is None


def test_changes_of_full_rank_are_uneven_only_if_one_was_repeated() -> None:
    even = [_change(layer, 0.1, rank=0, writes=1) for layer in range(4)]
    assert uneven_layer([*even, _change(4, 0.2, rank=0, writes=1)]) is None
    assert uneven_layer([*even, _change(4, 0.066, rank=23, writes=1)]) is None
    assert uneven_layer([*even, _change(4, 0.13, rank=0, writes=2)]) is None
    found = uneven_layer([*even, _change(4, 0.2, rank=0, writes=2)])
    assert found is not None
    assert "written to twice" in found[1]


def test_adapters_of_one_rank_whose_sizes_differ_by_no_whole_factor_are_not_uneven() -> None:
    even = [_change(layer, 0.1) for layer in range(4)]
    assert uneven_layer([*even, _change(4, 0.066)]) is None
    assert uneven_layer([*even, _change(4, 0.25)]) is None
    assert uneven_layer([*even, _change(4, 0.4)]) is not None


def test_a_table_that_was_resized_is_not_compared(made: MadeWeights) -> None:
    model = make_model("llama", vocab_size=2000)
    model.resize_token_embeddings(2001, mean_resizing=False)
    assert made.changed(model) is None


@pytest.mark.parametrize("rows", [[-1], range(2000)], ids=["the padding", "all rows"])
def test_an_adapter_changes_most_rows_of_a_tied_table(made: MadeWeights, rows: list[int]) -> None:
    model = make_model("llama", vocab_size=2000, tie_word_embeddings=True)
    torch.manual_seed(0)
    change = torch.randn(len(rows), 2) @ torch.randn(2, 48)
    with torch.no_grad():
        model.model.embed_tokens.weight[list(rows)] += change
    facts = made.changed(model)
    assert facts is not None
    assert bool(facts.get("tied")) is (len(rows) > 1)


def test_a_new_parameter_with_the_id_of_one_that_is_gone_is_not_taken_for_it(
    made: MadeWeights,
) -> None:
    model = make_model("llama")
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() + 1)
    gone = weakref.ref(torch.nn.Parameter(torch.ones(1)))
    owners: Any = made._made[model].owners
    owners[id(projection.weight)] = gone, "model.layers.0.self_attn.q_proj.weight"
    facts = made.changed(model)
    assert facts is not None
    (group,) = facts["groups"]
    assert [one["layer"] for one in group["parameters"]] == [1]
