"""Neutral norms, tied tensors and transposed adapters are found in what a program changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import make_model

from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.changed_weights import CHANGED_EVENT, ChangedWeightsRule
from flexinspect_hooks.changed_weights.made_weights import MadeWeights


def facts_of(made: MadeWeights, model: Any) -> dict[str, Any]:
    facts = made.changed(model)
    assert facts is not None
    return facts


@pytest.mark.parametrize("neutral", [0.0, 1.0])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_norm_with_the_neutral_weight_of_another_kind_has_a_wrong_gain(
    made: MadeWeights, family: str, neutral: float
) -> None:
    model = make_model(family, num_hidden_layers=3)
    name = "pre_feedforward_layernorm" if family == "gemma2" else "post_attention_layernorm"
    with torch.no_grad():
        for one, weight in model.named_parameters():
            if "norm" in one:
                weight.normal_(0.5, 0.2)
        model.model.layers[1].get_submodule(name).weight.fill_(neutral)
    found = facts_of(made, model).get("norms", [])
    if (neutral == 0) == (family == "gemma2"):
        assert not found
        return
    (norm,) = found
    assert norm["name"] == f"model.layers.1.{name}"
    assert (norm["weight"], norm["gain"]) == (neutral, 2.0 if neutral else 0.0)


def test_the_gain_of_a_norm_is_read_without_the_hooks_of_the_program(made: MadeWeights) -> None:
    model, seen = make_model("llama", num_hidden_layers=3), list[str]()
    with torch.no_grad():
        for one, weight in model.named_parameters():
            if "norm" in one:
                weight.normal_(0.5, 0.2)
        norm = model.model.layers[1].post_attention_layernorm
        norm.weight.fill_(0.0)
    norm.register_forward_hook(lambda *_: seen.append("norm"))
    (found,) = facts_of(made, model)["norms"]
    assert (found["gain"], seen) == (0.0, [])


def test_norms_that_all_are_neutral_are_not_reported(made: MadeWeights) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight += 1
    assert "norms" not in facts_of(made, model)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapter_that_is_merged_into_a_tied_head_is_reported(
    made: MadeWeights, is_tied: bool
) -> None:
    model = make_model("llama", tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    weight = model.lm_head.weight
    with torch.no_grad():
        weight += torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1])
    found = facts_of(made, model).get("tied", [])
    names = [one["names"] for one in found]
    assert names == ([["model.embed_tokens.weight", "lm_head.weight"]] if is_tied else [])


@pytest.mark.parametrize(
    ("rank", "is_named"), [(4, True), (0, False), (1, False)], ids=["adapter", "rows", "vector"]
)
def test_an_adapter_of_a_part_of_the_vocabulary_is_told_from_rows_that_are_set(
    made: MadeWeights, rank: int, is_named: bool
) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    torch.manual_seed(0)
    weight = model.lm_head.weight
    n_rows, width = len(weight) // 4, weight.shape[1]
    change = torch.randn(n_rows, rank) @ torch.randn(rank, width) if rank > 1 else None
    if change is None:
        change = torch.randn(n_rows if rank == 0 else 1, width).expand(n_rows, -1)
    with torch.no_grad():
        weight[-n_rows:] += change
    assert bool(facts_of(made, model).get("tied")) is is_named


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_transposed_delta_of_a_square_matrix_is_told_from_a_right_one(
    made: MadeWeights, family: str, broken: bool
) -> None:
    model = make_model(family)
    is_flipped = family == "gpt2"  # Conv1D keeps (inputs, outputs)
    modules = {
        "gpt2": ("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj"),
        "llama": ("model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"),
    }[family]
    torch.manual_seed(0)
    held = []
    with torch.no_grad():
        for name in modules:
            weight: Any = model.get_submodule(name).weight
            n_in, n_out = weight.shape if is_flipped else weight.shape[::-1]
            a, b = torch.randn(3, n_in), torch.randn(n_out, 3)
            held.append((a, b))
            is_wrong = broken and n_in == n_out
            weight += 0.1 * ((b @ a).T if is_flipped is not is_wrong else b @ a)
    found = facts_of(made, model).get("transposed", [])
    assert [one["name"] for one in found] == ([f"{modules[1]}.weight"] if broken else [])
    assert len(held) == 2  # the program still holds the factors


def test_an_uneven_change_of_a_parameter_with_a_known_mistake_is_its_consequence() -> None:
    n_merges = [1, 2, 1]
    parameters = [
        {"layer": layer, "change": float(n), "rank": 2, "writes": n}
        for layer, n in enumerate(n_merges)
    ]
    groups = [{"name": f"model.layers.*.{name}.weight", "parameters": parameters} for name in "ab"]
    norm = {"name": "model.layers.1.a", "class": "GemmaRMSNorm", "weight": 1.0, "gain": 2.0}
    data = {"groups": groups, "norms": [norm], "changed": 6, "total": 30}
    event = EventRecord(CHANGED_EVENT, "", 0.0, 0, 0, data)
    rule = ChangedWeightsRule()
    rule.context = RuleContext()
    step = StepRecord(0, 0, "prefill", 4, 0, 4, 1.0, 1.0, 0.1, events=(event,))
    gain, first, second, _ = rule.on_step(step)
    assert (gain.id, first.severity) == ("weights.norm-gain", Severity.NOTE)
    assert first.evidence["cause"] == "weights.norm-gain"
    assert second.severity is Severity.WARNING  # nothing else is known of the other parameter


def test_the_rule_knows_all_facts() -> None:
    kinds = set(ChangedWeightsRule.findings)
    assert {"weights.norm-gain", "weights.tied-change", "weights.transposed-delta"} <= kinds
