"""Adapters of q, k, v, gate or up that land in other outputs of a fused projection are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.tiny import make_model
from support.weight_fixtures import misplaced_finding
from torch import Tensor, nn

from flexinspect.records.finding import Severity
from flexinspect_hooks.changed_weights.fused_parts import format_ranges, fused_parts
from flexinspect_hooks.changed_weights.made_weights import MadeWeights

QKV = {
    "phi3": ("model.layers.{}.self_attn.qkv_proj.weight", 48, 24),
    "gpt2": ("transformer.h.{}.attn.c_attn.weight", 48, 48),
    "gpt_neox": ("gpt_neox.layers.{}.attention.query_key_value.weight", 48, 48),
    "falcon": ("transformer.h.{}.self_attention.query_key_value.weight", 48, 24),
}
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_hidden_layers": 3}


def family_model(family: str, **options: Any) -> Any:
    return make_model(family, **(FALCON if family == "falcon" else {}), **options)


@torch.no_grad()
def merge(
    model: Any,
    name: str,
    adapters: Mapping[Any, tuple[Tensor, Tensor]],
    into: Mapping[str, Tensor],
) -> None:
    """Add each adapter (A, B), by its layer and name, to the outputs that `into` has for it."""
    for (layer, module), (a, b) in adapters.items():
        parameter: Any = model.get_parameter(name.format(layer))
        delta = 2.0 * (b @ a)
        if "c_attn" in name:
            parameter[:, into[module]] += delta.T
        else:
            parameter[into[module]] += delta


def adapters_of(
    sizes: Mapping[str, int], n_inputs: int = 48, rank: int = 3, layers: tuple[int, ...] = (0, 2)
) -> dict[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return {
        (layer, module): (torch.randn(rank, n_inputs) * 0.1, torch.randn(n, rank) * 0.1)
        for layer in layers
        for module, n in sizes.items()
    }


def misplaced(made: MadeWeights, model: Any) -> list[dict[str, Any]]:
    facts = made.changed(model)
    assert facts is not None
    found: list[dict[str, Any]] = facts.get("misplaced", [])
    return found


@pytest.mark.parametrize("family", QKV)
@pytest.mark.parametrize("rank", [1, 3])
def test_an_adapter_in_its_own_part_is_right(made: MadeWeights, family: str, rank: int) -> None:
    model = family_model(family)
    name, n_q, n_kv = QKV[family]
    sizes = {"q_proj": n_q, "k_proj": n_kv, "v_proj": n_kv}
    parts = fused_parts(model, name.format(0))
    assert {f"{part}_proj": len(one) for part, one in parts.items()} == sizes
    into = {f"{part}_proj": one for part, one in parts.items()}
    for chosen in (("q_proj", "v_proj"), tuple(sizes)):
        merge(model, name, adapters_of({one: sizes[one] for one in chosen}, rank=rank), into)
        assert not misplaced(made, model)


@pytest.mark.parametrize("family", QKV)
@pytest.mark.parametrize("rank", [1, 3])
def test_values_in_the_outputs_of_keys_are_named(made: MadeWeights, family: str, rank: int) -> None:
    model = family_model(family)
    name, n_q, n_kv = QKV[family]
    parts = fused_parts(model, name.format(0))
    into = {"q_proj": parts["q"], "v_proj": parts["k"]}
    merge(model, name, adapters_of({"q_proj": n_q, "v_proj": n_kv}, rank=rank), into)
    (found,) = misplaced(made, model)
    assert (found["own"], found["hit"], found["layers"]) == ("v", ["k"], [0, 2])
    assert found["adapter"] == "0.v_proj"
    assert found["axis"] == ("columns" if family == "gpt2" else "rows")
    assert found["outputs"] == format_ranges(parts["k"].tolist())


def test_blocks_in_a_projection_with_the_parts_of_each_head_are_named(made: MadeWeights) -> None:
    model = family_model("gpt_neox")
    name = QKV["gpt_neox"][0]
    into = {"q": torch.arange(48), "k": torch.arange(48, 96), "v": torch.arange(96, 144)}
    merge(model, name, adapters_of(dict.fromkeys(into, 48)), into)
    found = {one["own"]: one for one in misplaced(made, model)}
    assert set(found) == {"q", "k", "v"}
    assert found["v"]["outputs"] == "96:144"
    assert found["v"]["own_outputs"] == "24:36, 60:72, 96:108, ..."


def test_the_parts_of_each_head_in_a_projection_with_blocks_are_named(made: MadeWeights) -> None:
    model = family_model("gpt2")
    table = torch.arange(144).view(4, 3, 12)
    into = {one: table[:, n].flatten() for n, one in enumerate("qkv")}
    merge(model, QKV["gpt2"][0], adapters_of(dict.fromkeys(into, 48)), into)
    assert len(misplaced(made, model)) == 3


@pytest.mark.parametrize("broken", [True, False])
def test_up_in_the_rows_of_the_gate_is_named(made: MadeWeights, broken: bool) -> None:
    model = family_model("phi3")
    name = "model.layers.{}.mlp.gate_up_proj.weight"
    parts = fused_parts(model, name.format(1))
    first, second = ("up", "gate") if broken else ("gate", "up")
    into = {"gate_proj": parts[first], "up_proj": parts[second]}
    merge(model, name, adapters_of({"gate_proj": 96, "up_proj": 96}), into)
    found = misplaced(made, model)
    assert [(one["own"], one["hit"]) for one in found] == (
        [("gate", ["up"]), ("up", ["gate"])] if broken else []
    )


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_large_weights_blocks_are_enough(
    made: MadeWeights, broken: bool, dtype: torch.dtype
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = family_model("phi3", **sizes, num_hidden_layers=2, dtype=dtype)
    name = QKV["phi3"][0]
    parts = fused_parts(model, name.format(0))
    into = {"q_proj": parts["q"], "v_proj": parts["k" if broken else "v"]}
    adapters = adapters_of({"q_proj": 256, "v_proj": 128}, 256, layers=(0, 1))
    merge(model, name, {key: (a.to(dtype), b.to(dtype)) for key, (a, b) in adapters.items()}, into)
    assert [one["layers"] for one in misplaced(made, model)] == ([[0, 1]] if broken else [])


def test_values_that_are_added_to_the_keys_beside_an_adapter_of_the_keys_are_named(
    made: MadeWeights,
) -> None:
    model = family_model("phi3")
    name, n_q, n_kv = QKV["phi3"]
    parts = fused_parts(model, name.format(0))
    into = {"q_proj": parts["q"], "k_proj": parts["k"], "v_proj": parts["k"]}
    merge(model, name, adapters_of({"q_proj": n_q, "k_proj": n_kv, "v_proj": n_kv}), into)
    (found,) = misplaced(made, model)
    assert (found["own"], found["hit"]) == ("v", ["k"])


def test_factors_that_are_called_keys_as_well_are_right(made: MadeWeights) -> None:
    model = family_model("phi3")
    name, _, n_kv = QKV["phi3"]
    parts = fused_parts(model, name.format(0))
    saved = adapters_of({"v_proj": n_kv})

    def rename_and_merge(old: Mapping[Any, tuple[Tensor, Tensor]]) -> None:
        new = {(layer, "k_proj"): pair for (layer, _), pair in old.items()}
        merge(model, name, new, {"k_proj": parts["k"]})

    rename_and_merge(saved)
    assert not misplaced(made, model)


def test_other_weights_and_modules_have_no_parts() -> None:
    model = family_model("phi3")
    assert not fused_parts(model, "model.layers.0.self_attn.o_proj.weight")
    assert not fused_parts(nn.Sequential(nn.Linear(3, 3)), "0.weight")
    assert format_ranges([0, 1, 2, 7]) == "0:3, 7:8"


def test_the_rule_says_which_rows_got_an_adapter() -> None:
    facts = {
        "name": "model.layers.*.self_attn.qkv_proj.weight",
        "layers": [1, 3],
        "order": "part",
        "adapter": "1.v_proj",
        "own": "v",
        "hit": ["k"],
        "axis": "rows",
        "outputs": "64:96",
        "own_outputs": "96:128",
    }
    data = {"groups": [], "changed": 2, "total": 9, "misplaced": [facts]}
    finding = misplaced_finding(data)
    assert finding.severity is Severity.ERROR
    assert finding.layers == (1, 3)
    assert "1.v_proj was added to rows 64:96" in finding.sentence
    assert "those of k: the rows of v are 96:128" in finding.sentence
    assert "Layer 3 likewise." in finding.sentence
