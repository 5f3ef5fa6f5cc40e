"""Modules and values that a program puts in the place of weights are compared with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import make_model
from torch import Tensor, nn

from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord, GenerationRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.changed_weights import REPLACED_EVENT, ChangedWeightsRule
from flexinspect_hooks.changed_weights.made_weights import MadeWeights

WIDE = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
}
Change = Callable[[Tensor], Tensor]


class Given(nn.Module):
    """A linear layer that keeps its weight (outputs, inputs) as a buffer of another name."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("table", weight)
        self.register_buffer("shift", bias)

    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        return nn.functional.linear(x, table.to(x.dtype), self.shift)  # type: ignore[arg-type]


class Saturated(Given):
    """Is no linear function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


def replace(model: Any, name: str, change: Change, kind: type[Given] = Given) -> None:
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    old = owner.get_submodule(leaf)
    weight = old.weight.detach()
    weight = weight.T if type(old).__name__ == "Conv1D" else weight
    bias = getattr(old, "bias", None)
    setattr(
        owner,
        leaf,
        kind(change(weight.contiguous().clone()), None if bias is None else bias.detach()),
    )


def found_in(made: MadeWeights, model: Any) -> list[tuple[str, dict[str, Any]]]:
    root = nn.Module()
    for name, module in model.named_children():
        root.add_module(name, module)
    root.config = model.config
    return list(made.replaced_of(model)(root))


def by_steps(weight: Tensor, top: int, dim: int = 1) -> Tensor:
    scale = weight.abs().amax(dim, keepdim=True).clamp_min(1e-9) / top
    return (weight / scale).round().clamp(-top, top) * scale


def in_8_bits(weight: Tensor) -> Tensor:
    return by_steps(weight, 127)


def in_4_bits(weight: Tensor) -> Tensor:
    return by_steps(weight.view(-1, 16), 7).view(weight.shape)


def in_4_bits_with_zero_points(weight: Tensor) -> Tensor:
    groups = weight.view(-1, 16)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    return (((groups - low) / scale).round() * scale + low).view(weight.shape)


def in_normal_floats(weight: Tensor) -> Tensor:
    levels = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.03, 0.97, 16))
    levels = levels / levels.abs().max()
    scale = weight.view(-1, 16).abs().amax(1, keepdim=True)
    nearest = (weight.view(-1, 16, 1) / scale[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * scale).view(weight.shape)


def ternary(weight: Tensor) -> Tensor:
    scale = weight.abs().mean()
    return (weight / scale).round().clamp(-1, 1) * scale


def in_2_bits(weight: Tensor) -> Tensor:
    return by_steps(weight, 1)


def in_bfloat16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def halved(weight: Tensor) -> Tensor:
    """All of it: a factor that something else may take back."""
    return weight * 0.5


def of_low_rank(weight: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return (u[:, :24] * s[:24]) @ v[:24]


def pruned(weight: Tensor) -> Tensor:
    """Half of the weights of each row, the small ones."""
    return weight * (weight.abs() > weight.abs().median(1, keepdim=True).values)


RIGHT = [
    in_8_bits,
    in_4_bits,
    in_4_bits_with_zero_points,
    in_normal_floats,
    ternary,
    in_2_bits,
    in_bfloat16,
    halved,
    of_low_rank,
    pruned,
]
PLACES = ["mlp.down_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.q_proj"]


@pytest.mark.parametrize("sizes", [{}, WIDE])
@pytest.mark.parametrize("change", RIGHT)
def test_what_a_quantisation_does_is_right(
    made: MadeWeights, change: Change, sizes: dict[str, int]
) -> None:
    model = make_model("llama", **sizes)
    for layer in (0, 1):
        for place in PLACES[layer::2]:
            replace(model, f"model.layers.{layer}.{place}", change)
    assert not found_in(made, model)


@pytest.mark.parametrize("change", RIGHT)
def test_what_a_quantisation_in_place_does_is_right(made: MadeWeights, change: Change) -> None:
    model = make_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.copy_(change(layer.mlp.down_proj.weight))
    facts = made.changed(model)
    assert facts is not None
    assert not facts["orders"]
    assert not facts["wrapped"]


# -- other orders ----------------------------------------------------------------------------------


def swap_nibbles(weight: Tensor) -> Tensor:
    return in_4_bits(weight).view(len(weight), -1, 2).flip(2).flatten(1)


def halves_for_pairs(weight: Tensor) -> Tensor:
    """Columns that were packed as pairs are unpacked as two halves."""
    low, high = in_8_bits(weight).view(len(weight), -1, 2).unbind(2)
    return torch.cat([low, high], 1)


@pytest.mark.parametrize("sizes", [{}, WIDE])
@pytest.mark.parametrize("change", [swap_nibbles, halves_for_pairs])
@pytest.mark.parametrize(
    ("place", "kinds"),
    [
        ("mlp.down_proj", {"neurons"}),
        ("mlp.up_proj", {"channels"}),
        ("self_attn.o_proj", {"rows of heads"}),
    ],
)
def test_columns_in_another_order_are_named(
    made: MadeWeights, change: Change, place: str, kinds: set[str], sizes: dict[str, int]
) -> None:
    model = make_model("llama", **sizes)
    replace(model, f"model.layers.1.{place}", change)
    found = found_in(made, model)
    assert {facts["kind"] for what, facts in found if what == "orders"} >= kinds
    assert {what for what, _ in found} == {"orders"}
    assert all(facts["class"] == "Given" for _, facts in found)
    assert all(facts["module"] == f"model.layers.1.{place}" for _, facts in found)


def test_a_conv_of_gpt2_that_is_replaced_is_read_by_its_outputs(made: MadeWeights) -> None:
    model = make_model("gpt2")
    replace(model, "transformer.h.1.mlp.c_proj", in_8_bits)
    replace(model, "transformer.h.1.attn.c_proj", in_8_bits)
    assert not found_in(made, model)
    replace_again = model.transformer.h[1].mlp
    replace_again.c_proj = Given(swap_nibbles(replace_again.c_proj.table), None)
    ((what, facts),) = found_in(made, model)
    assert (what, facts["kind"]) == ("orders", "neurons")


def test_neurons_that_are_renumbered_in_all_weights_are_right(made: MadeWeights) -> None:
    model = make_model("llama")
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    for name in ("gate_proj", "up_proj"):
        replace(model, f"model.layers.1.mlp.{name}", lambda weight: in_8_bits(weight)[order])
    replace(model, "model.layers.1.mlp.down_proj", lambda weight: in_8_bits(weight)[:, order])
    assert not found_in(made, model)


# -- other scales ----------------------------------------------------------------------------------


def flip_rows(weight: Tensor) -> Tensor:
    return in_8_bits(weight) * torch.where(torch.arange(len(weight)) % 3 == 0, -1.0, 1.0)[:, None]


def uneven(n: int) -> Tensor:
    return torch.exp(0.7 * torch.randn(n, generator=torch.Generator().manual_seed(5)))


def other_rows(weight: Tensor) -> Tensor:
    return in_8_bits(weight) * uneven(len(weight))[:, None]


def other_columns(weight: Tensor) -> Tensor:
    return in_8_bits(weight) * uneven(weight.shape[1])


def next_groups(weight: Tensor) -> Tensor:
    """Integers of 8 bits in groups, each with the scale of the next group."""
    groups = weight.view(-1, 16)
    top = groups.abs().amax(1, keepdim=True)
    return ((127 * groups / top).round() / 127 * top.roll(1, 0)).view(weight.shape)


def next_zero_points(weight: Tensor) -> Tensor:
    groups = weight.view(-1, 16)
    low = groups.amin(1, keepdim=True)
    scale = (groups.amax(1, keepdim=True) - low) / 255
    return (((groups - low) / scale).round() * scale + low.roll(1, 0)).view(weight.shape)


def other_groups(weight: Tensor) -> Tensor:
    groups = in_4_bits(weight).view(-1, 16)
    return (groups * uneven(len(groups))[:, None]).view(weight.shape)


def other_zero_points(weight: Tensor) -> Tensor:
    groups = in_4_bits_with_zero_points(weight).view(-1, 16)
    low = groups.amin(1, keepdim=True)
    return (groups - low + 3 * low.roll(1, 0)).view(weight.shape)


SCALED = [
    (flip_rows, "factor", "outputs", True),
    (other_rows, "factor", "outputs", False),
    (other_columns, "factor", "inputs", False),
    (other_groups, "factor", "groups of 16 inputs", False),
    (next_groups, "factor", "groups of 16 inputs", True),
    (other_zero_points, "added", "groups of 16 inputs", False),
    (next_zero_points, "added", "groups of 16 inputs", True),
]


@pytest.mark.parametrize(("change", "kind", "axis", "is_sure"), SCALED)
def test_other_scales_are_named(
    made: MadeWeights, change: Change, kind: str, axis: str, is_sure: bool
) -> None:
    model = make_model("llama")
    replace(model, "model.layers.0.mlp.down_proj", change)
    replace(model, "model.layers.1.mlp.down_proj", change)
    found = found_in(made, model)
    told = [(facts["name"], what, facts["kind"], facts["axis"]) for what, facts in found]
    assert told == [
        (f"model.layers.{n}.mlp.down_proj.weight", "scaled", kind, axis) for n in (0, 1)
    ]
    assert all(facts["is_sure"] is is_sure for _, facts in found)


def test_factors_that_another_weight_of_the_layer_takes_back_are_right(made: MadeWeights) -> None:
    model = make_model("llama")
    replace(model, "model.layers.0.mlp.up_proj", other_rows)
    scale = uneven(96)
    replace(model, "model.layers.0.mlp.down_proj", lambda weight: in_8_bits(weight) / scale)
    assert not found_in(made, model)


@pytest.mark.parametrize("how", ["norm", "hook", "module"])
def test_factors_that_something_else_may_take_back_are_right(made: MadeWeights, how: str) -> None:
    model = make_model("llama")
    layer, scale = model.model.layers[0], uneven(48)
    for name in ("gate_proj", "up_proj"):
        replace(model, f"model.layers.0.mlp.{name}", lambda weight: in_8_bits(weight) * scale)
    if how == "norm":
        with torch.no_grad():
            layer.post_attention_layernorm.weight /= scale
    elif how == "hook":
        layer.post_attention_layernorm.register_forward_hook(lambda _m, _a, rows: rows / scale)
    else:
        layer.post_attention_layernorm = nn.Sequential(
            layer.post_attention_layernorm, Given(torch.diag(1 / scale))
        )
    assert not found_in(made, model)


# -- overflow --------------------------------------------------------------------------------------


def wrap(weight: Tensor, bits: int, size: int) -> Tensor:
    """Quantise groups with absmax / 2 ** (bits - 1), without a clamp."""
    half = 2 ** (bits - 1)
    groups = weight.reshape(-1, size)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-9) / half
    codes = ((groups / scale).round() + half) % (2 * half) - half
    return (codes * scale).reshape(weight.shape)


@pytest.mark.parametrize(("bits", "size"), [(8, 96), (8, 32), (4, 32), (4, 16)])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_integers_that_wrap_around_are_named(
    made: MadeWeights, bits: int, size: int, is_replaced: bool
) -> None:
    model = make_model("llama")
    name = "model.layers.1.mlp.down_proj"
    if is_replaced:
        replace(model, name, lambda weight: wrap(weight, bits, size))
        ((what, facts),) = found_in(made, model)
        assert what == "wrapped"
    else:
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            weight.copy_(wrap(weight, bits, size))
        changed = made.changed(model)
        assert changed is not None
        (facts,) = changed["wrapped"]
    assert facts["name"] == f"{name}.weight"
    assert facts["is"] == pytest.approx(-facts["was"], rel=0.15)


def test_a_scale_that_clips_without_a_clamp_wraps_as_well(made: MadeWeights) -> None:
    model = make_model("llama")
    weight = model.lm_head.weight
    scale = weight.abs().amax(1, keepdim=True) * 0.85 / 127
    with torch.no_grad():
        weight.copy_(((weight / scale).round() + 128).remainder(256).sub(128) * scale)
    changed = made.changed(model)
    assert changed is not None
    assert [one["name"] for one in changed["wrapped"]] == ["lm_head.weight"]


def test_signs_that_a_program_changes_elsewhere_are_no_overflow(made: MadeWeights) -> None:
    model = make_model("llama")
    weight = model.lm_head.weight
    with torch.no_grad():
        weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.02] *= -1
    changed = made.changed(model)
    assert changed is not None
    assert not changed["wrapped"]


# -- what is not judged ----------------------------------------------------------------------------


def test_modules_that_are_no_linear_function_or_keep_the_weight_are_not_judged(
    made: MadeWeights,
) -> None:
    model = make_model("llama")
    replace(model, "model.layers.0.mlp.down_proj", swap_nibbles, Saturated)

    class Adapted(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.base(x.flip(-1))
            return output

    mlp = model.model.layers[1].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    assert not found_in(made, model)


def test_a_model_that_was_not_seen_when_it_was_made_has_no_facts() -> None:
    model = make_model("llama")
    replace(model, "model.layers.0.mlp.down_proj", swap_nibbles)
    assert not found_in(MadeWeights(), model)


# -- sentences -------------------------------------------------------------------------------------


def told(made: MadeWeights, change: Change) -> Any:
    model = make_model("llama")
    replace(model, "model.layers.1.mlp.down_proj", change)
    ((what, facts),) = found_in(made, model)
    context, rule = RuleContext(), ChangedWeightsRule()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()))
    rule.on_generation_start(context)
    data = {"what": what, **facts}
    (finding,) = rule.on_event(EventRecord(REPLACED_EVENT, "", 0.0, 0, None, data))
    assert finding.layer == 1
    return finding


def test_the_rule_says_how_columns_lie(made: MadeWeights) -> None:
    finding = told(made, swap_nibbles)
    assert (finding.id, finding.severity) == ("weights.order", Severity.WARNING)
    assert (
        "The inputs of model.layers.1.mlp.down_proj.weight have the neurons in the order 1, 0"
        in (finding.sentence)
    )
    assert "neighbours are exchanged" in finding.sentence
    assert "model.layers.1.mlp.down_proj is the program's Given" in finding.sentence


def test_the_rule_says_what_wrapped(made: MadeWeights) -> None:
    finding = told(made, lambda weight: wrap(weight, 8, 96))
    assert (finding.id, finding.severity) == ("weights.quantization-overflow", Severity.ERROR)
    assert "model.layers.1.mlp.down_proj.weight (Given) is what it was to within" in (
        finding.sentence
    )


def test_the_rule_says_which_factors_a_module_has(made: MadeWeights) -> None:
    finding = told(made, flip_rows)
    assert (finding.id, finding.severity) == ("weights.replaced-values", Severity.WARNING)
    assert "times a factor for each of the outputs, from -1" in finding.sentence
    finding = told(made, other_rows)
    assert finding.severity is Severity.NOTE
    assert "right only for factors that were learned" in finding.sentence
