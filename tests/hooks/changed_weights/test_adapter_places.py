"""Adapters that land in the weights of another layer or module, or transposed, are found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support.tiny import make_model
from support.weight_fixtures import misplaced_finding
from torch import Tensor, nn

from flexinspect_hooks.changed_weights import adapter_factors
from flexinspect_hooks.changed_weights.made_weights import MadeWeights

LAYERS = 11


BUDGET_S = adapter_factors._BUDGET_S


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeWeights]:
    # On a busy machine, reading takes more of the processor's time, too.
    monkeypatch.setattr(adapter_factors, "_BUDGET_S", 20 * BUDGET_S)
    weights = MadeWeights()
    stop = weights.watch()
    yield weights
    stop()
    assert "__iadd__" not in vars(nn.Parameter)
    assert "data" not in vars(nn.Parameter)


def checkpoint(
    model: Any, modules: tuple[str, ...] = ("q_proj",), stem: str = "layers.{}.self_attn.{}"
) -> dict[str, Tensor]:
    """Return factors by name, as a trainer saves them."""
    torch.manual_seed(3)
    state = {}
    for layer, block in enumerate(model.model.layers):
        for module in modules:
            n_out, n_in = block.self_attn.get_submodule(module).weight.shape
            name = stem.format(layer, module)
            state[f"{name}.lora_A.weight"] = torch.randn(3, n_in) * 0.1
            state[f"{name}.lora_B.weight"] = torch.randn(n_out, 3) * 0.1
    return state


def in_place(weight: Any, delta: Tensor) -> None:
    weight += delta


def through_data(weight: Any, delta: Tensor) -> None:
    weight.data.add_(delta)


def as_data(weight: Any, delta: Tensor) -> None:
    weight.data = weight.data + delta


def by_copy(weight: Any, delta: Tensor) -> None:
    weight.copy_(weight + delta)


WRITES = [in_place, through_data, as_data, by_copy]


@torch.no_grad()
def merge(
    model: Any,
    order: Callable[[list[int]], list[int]] | None = None,
    module: str = "q_proj",
    write: Callable[[Any, Tensor], None] = in_place,
    stem: str = "layers.{}.self_attn.{}",
    saved: Mapping[str, Tensor] | None = None,
) -> None:
    """Add to `module` of each layer the q_proj adapter of the layer that `order` gives."""
    state = dict(checkpoint(model, ("q_proj", "o_proj"), stem) if saved is None else saved)
    layers = list(range(len(model.model.layers)))
    for block, number in zip(model.model.layers, order(layers) if order else layers, strict=True):
        prefix = stem.format(number, "q_proj")
        a, b = state[f"{prefix}.lora_A.weight"], state[f"{prefix}.lora_B.weight"]
        write(block.self_attn.get_submodule(module).weight, 2.0 * (b @ a))


def facts_of(made: MadeWeights, model: Any) -> dict[str, Any]:
    facts = made.changed(model)
    assert facts is not None
    return facts


def as_text(layers: list[int]) -> list[int]:
    return sorted(layers, key=str)


def a_layer_off(layers: list[int]) -> list[int]:
    return [max(one - 1, 0) for one in layers]


def swapped(layers: list[int]) -> list[int]:
    return [0, 2, 1, *layers[3:]]


ORDERS = [
    (as_text, [2, 3, 4, 5, 6, 7, 8, 9, 10], "text"),
    (lambda layers: layers[::-1], [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], "reversed"),
    (lambda layers: [10] * len(layers), [*range(10)], "same"),
    (a_layer_off, [*range(1, LAYERS)], ""),
    (swapped, [1, 2], ""),
]


@pytest.mark.parametrize(("order", "wrong", "said"), ORDERS)
def test_adapters_of_other_layers_are_named(
    made: MadeWeights, order: Any, wrong: list[int], said: str
) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)
    merge(model, order)
    (found,) = facts_of(made, model)["misplaced"]
    assert (found["layers"], found["order"]) == (wrong, said)
    assert found["taken"] == [order(list(range(LAYERS)))[layer] for layer in wrong]
    assert found["adapter"] == f"layers.{found['taken'][0]}.self_attn.q_proj"
    assert found["own"] == f"layers.{wrong[0]}.self_attn.q_proj"


@pytest.mark.parametrize("write", WRITES)
def test_each_way_to_write_a_weight_is_seen(made: MadeWeights, write: Any) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)
    merge(model, as_text, write=write)
    assert facts_of(made, model)["misplaced"]


def test_a_weight_that_is_put_in_anew_is_seen(made: MadeWeights) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)

    @torch.no_grad()
    def put(state: dict[str, Tensor]) -> None:
        for block, number in zip(model.model.layers, as_text(list(range(LAYERS))), strict=True):
            name = f"layers.{number}.self_attn.q_proj"
            delta = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
            projection = block.self_attn.q_proj
            projection.weight = nn.Parameter(projection.weight + delta)

    put(checkpoint(model))
    assert facts_of(made, model)["misplaced"]


def test_the_adapter_of_another_module_is_named(made: MadeWeights) -> None:
    model = make_model("llama", num_hidden_layers=3)
    merge(model, module="o_proj")
    (found,) = facts_of(made, model)["misplaced"]
    assert found["order"] == "module"
    assert found["layers"] == [0, 1, 2]
    assert (found["adapter"], found["own"]) == (
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.o_proj",
    )


def test_a_right_merge_has_no_facts_whatever_the_names_are(made: MadeWeights) -> None:
    for stem in ("layers.{}.self_attn.{}", "base_model.model.h.{}.{}", "blocks.layer_{}.{}"):
        model = make_model("llama", num_hidden_layers=4)
        merge(model, stem=stem)
        facts = facts_of(made, model)
        assert not facts.get("misplaced")
        assert not facts.get("flipped")


def test_names_that_count_layers_from_1_are_right(made: MadeWeights) -> None:
    model = make_model("llama", num_hidden_layers=4)
    state = {
        name.replace(f"layers.{n}.", f"layers.{n + 1}."): one
        for name, one in checkpoint(model).items()
        for n in range(4)
        if name.startswith(f"layers.{n}.")
    }
    merge(model, lambda layers: [one + 1 for one in layers], saved=state)
    assert "misplaced" not in facts_of(made, model)


def test_adapters_of_a_larger_model_go_where_the_program_wants_them(made: MadeWeights) -> None:
    large, small = make_model("llama", num_hidden_layers=8), make_model("llama")
    state = checkpoint(large)
    merge(small, lambda layers: [2 * one for one in layers], saved=state)
    assert "misplaced" not in facts_of(made, small)


def test_adapters_of_repeated_layers_are_repeated(made: MadeWeights) -> None:
    small, large = make_model("llama", num_hidden_layers=4), make_model("llama")
    state = checkpoint(small)
    large = make_model("llama", num_hidden_layers=6)
    merge(large, lambda _: [0, 1, 2, 1, 2, 3], saved=state)
    assert "misplaced" not in facts_of(made, large)


def test_adapters_that_were_renamed_first_are_right_by_their_new_names(made: MadeWeights) -> None:
    model = make_model("llama", num_hidden_layers=4)
    original = checkpoint(model)

    def rename() -> dict[str, Tensor]:
        return {
            f"layers.{3 - int(name.split('.')[1])}.{name.split('.', 2)[2]}": one
            for name, one in original.items()
        }

    merge(model, saved=rename())  # `original` is a variable of the caller, with other numbers
    assert "misplaced" not in facts_of(made, model)


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_square_matrix_alone_is_judged_by_the_names_of_the_factors(
    made: MadeWeights, family: str, broken: bool
) -> None:
    model = make_model(family)
    is_flipped = family == "gpt2"
    name = "transformer.h.1.attn.c_proj" if is_flipped else "model.layers.1.self_attn.q_proj"

    @torch.no_grad()
    def fold() -> None:
        weight: Any = model.get_submodule(name).weight
        torch.manual_seed(0)
        state = {f"{name}.lora_A": torch.randn(3, len(weight))}
        state[f"{name}.lora_B"] = torch.randn(len(weight), 3)
        delta = state[f"{name}.lora_B"] @ state[f"{name}.lora_A"]
        weight += delta.T if is_flipped is not broken else delta

    fold()
    found = facts_of(made, model).get("flipped", [])
    assert [one["name"] for one in found] == ([f"{name}.weight"] if broken else [])


@pytest.mark.parametrize("broken", [True, False])
def test_factors_that_only_a_function_had_tell_a_transposed_delta(
    made: MadeWeights, broken: bool
) -> None:
    model = make_model("gpt2")

    @torch.no_grad()
    def fold(updates: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (b, a) in updates.items():
            weight: Any = model.get_submodule(name).weight
            delta = b @ a
            weight += delta if broken and delta.shape == weight.shape else delta.T

    torch.manual_seed(0)
    sizes = {"c_attn": (144, 48), "c_proj": (48, 48)}
    fold(
        {
            f"transformer.h.1.attn.{name}": (torch.randn(n, 3), torch.randn(3, m))
            for name, (n, m) in sizes.items()
        }
    )
    found = facts_of(made, model).get("transposed", [])
    assert [one["name"] for one in found] == (
        ["transformer.h.1.attn.c_proj.weight"] if broken else []
    )


def test_a_program_whose_A_gives_the_outputs_is_not_judged_by_names(made: MadeWeights) -> None:
    model = make_model("llama")

    @torch.no_grad()
    def fold() -> None:
        torch.manual_seed(0)
        state = dict[str, Tensor]()
        for module in ("self_attn.q_proj", "self_attn.k_proj"):
            name = f"model.layers.0.{module}"
            weight: Any = model.get_submodule(name).weight
            state[f"{name}.lora_A"] = torch.randn(weight.shape[0], 3)
            state[f"{name}.lora_B"] = torch.randn(3, weight.shape[1])
            weight += state[f"{name}.lora_A"] @ state[f"{name}.lora_B"]

    fold()
    assert "flipped" not in facts_of(made, model)


def test_the_time_for_reading_variables_is_bounded(
    made: MadeWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_factors, "_BUDGET_S", BUDGET_S)
    model = make_model("llama")
    rows = [[float(n)] * 50 for n in range(10_000)]
    tables = [{str(n): object() for n in range(10_000)} for _ in range(100)]
    started = time.thread_time()
    with torch.no_grad():
        for _ in range(50):
            model.lm_head.weight += 1
    assert time.thread_time() - started < 5
    assert "__iadd__" not in vars(nn.Parameter)  # the time is used up
    assert rows
    assert tables


def test_a_training_ends_the_search_for_factors(made: MadeWeights) -> None:
    made.drop_factors()
    assert "__iadd__" not in vars(nn.Parameter)


def test_operations_of_parameters_do_what_they_did(made: MadeWeights) -> None:
    model = make_model("llama")
    weight = model.lm_head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1, alpha=2)
        weight[0] = 7
        weight -= 1
    assert torch.allclose(weight[1:], before[1:] + 1, atol=1e-5)
    assert weight[0].eq(6).all()
    assert weight.data.data_ptr() == weight.data_ptr()
    assert type(weight.data) is Tensor
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="in-place"):
        weight += 1
    compiled = torch.compile(lambda one: one.data * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight), weight * 2)


def test_the_rule_says_which_adapter_a_layer_got() -> None:
    facts = {
        "name": "model.layers.*.self_attn.q_proj.weight",
        "layers": [2, 3, 4],
        "taken": [10, 11, 2],
        "adapter": "layers.10.self_attn.q_proj",
        "own": "layers.2.self_attn.q_proj",
        "order": "text",
    }
    data = {"groups": [], "changed": 3, "total": 3, "misplaced": [facts]}
    finding = misplaced_finding(data)
    assert "adapter named layers.10.self_attn.q_proj, not of layers.2" in finding.sentence
    assert "sorted as text" in finding.sentence
    assert finding.layers == (2, 3, 4)


def test_a_tensor_that_cannot_be_read_hides_no_misplaced_adapter(made: MadeWeights) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)
    # It has the rank of the factors as a side, and a copy of it fits in no memory.
    endless = torch.zeros(1, dtype=torch.float64).expand(3, 1 << 44)
    merge(model, as_text)
    assert facts_of(made, model)["misplaced"]
    assert endless.shape[0] == 3
