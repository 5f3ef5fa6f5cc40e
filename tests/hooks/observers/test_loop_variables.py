"""Rules of layers that a loop made: those that share its variable are found, others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexinspect_hooks.observers.attention.loop_variables import LateBinding, find_late_bindings

Rule = Callable[[Tensor, Tensor], Any]
WINDOWS = (2, 3, 4)


def late_lambdas() -> list[Rule]:
    return [lambda q, kv: q - kv < window for window in WINDOWS]  # noqa: B023


def late_functions() -> list[Rule]:
    rules: list[Rule] = []
    for number in range(len(WINDOWS)):
        window = WINDOWS[number]

        def rule(q: Tensor, kv: Tensor) -> Any:
            return q - kv < window  # noqa: B023

        rules.append(rule)
    return rules


def bound() -> list[Rule]:
    return [lambda q, kv, window=window: q - kv < window for window in WINDOWS]  # type: ignore[misc]


def made_by_a_function() -> list[Rule]:
    def make(window: int) -> Rule:
        return lambda q, kv: q - kv < window

    return [make(window) for window in WINDOWS]


def of_another_variable() -> list[Rule]:
    width, rules = 3, list[Rule]()
    for _ in WINDOWS:
        rules.append(lambda q, kv: q - kv < width)
    return rules


def found(rules: Sequence[Rule]) -> tuple[LateBinding, ...]:
    """Return what is found if each layer has the mask of one rule."""

    def block_mask(rule: Rule) -> Any:
        return create_block_mask(lambda b, h, q, kv: rule(q, kv), 1, 1, 8, 8, device="cpu")

    calls = [
        SimpleNamespace(layer=n, mask=block_mask(rule), kernel=None, module=MODULE)
        for n, rule in enumerate(rules)
    ]
    return find_late_bindings(cast(Any, calls))


@pytest.mark.parametrize("make", [late_lambdas, late_functions])
def test_rules_that_share_the_variable_of_their_loop_are_found(
    make: Callable[[], list[Rule]],
) -> None:
    (one,) = found(make())
    assert (one.variable, one.value, one.layers) == ("window", "4", (0, 1, 2))
    assert "test_loop_variables.py:" in one.source


@pytest.mark.parametrize("make", [bound, made_by_a_function, of_another_variable])
def test_rules_with_a_value_of_their_own_are_not_found(make: Callable[[], list[Rule]]) -> None:
    assert found(make()) == ()


def test_one_rule_for_all_layers_is_not_found() -> None:
    assert found([late_lambdas()[0]] * 3) == ()


# -- score_mods ------------------------------------------------------------------------------------

MODULE = torch.nn.Identity()
STRENGTHS = torch.tensor([0.8, 0.4, 0.1])
EQUAL = torch.full((3,), 0.5)
ScoreMod = Callable[..., Tensor]


class Layer(torch.nn.Module):
    """A layer that holds its own bias, as a program may attach it."""

    bias: ScoreMod
    scaling = 0.5

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def on_layers(table: Tensor, *, is_bound: bool = False) -> list[ScoreMod]:
    """Return score_mods that call a function that a loop put on each layer."""
    layers = [Layer(n) for n in range(3)]
    for index, layer in enumerate(layers):

        def late(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score - table[index] * (q - kv)  # noqa: B023

        def bound(*cell: Tensor, index: int = index) -> Tensor:
            return cell[0] - table[index] * (cell[3] - cell[4])

        layer.bias = bound if is_bound else late
    return [score_mod_of(layer) for layer in layers]


def score_mod_of(layer: Layer) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return layer.bias(score, b, h, q, kv)

    return score_mod


def in_a_list() -> list[ScoreMod]:
    return [lambda s, b, h, q, kv: s + slope * (q - kv) for slope in (0.8, 0.4, 0.1)]  # noqa: B023


def in_a_dict_that_is_looked_up() -> list[ScoreMod]:
    mods: dict[int, ScoreMod] = {}
    for index in range(3):
        slope = STRENGTHS[index]
        mods[index] = lambda s, b, h, q, kv: s - slope * (q - kv)  # noqa: B023

    def looked_up(layer: int) -> ScoreMod:
        return lambda *cell: mods[layer](*cell)

    return [looked_up(layer) for layer in range(3)]


def of_an_attribute_of_layers() -> list[ScoreMod]:
    mods: list[ScoreMod] = []
    for layer in (Layer(0), Layer(1), Layer(2)):
        scale = layer.scaling
        mods.append(lambda s, *cell: s * scale)  # noqa: B023
    return mods


def of_layers_themselves() -> list[ScoreMod]:
    mods: list[ScoreMod] = []
    for layer in (Layer(0), Layer(1), Layer(2)):
        mods.append(lambda s, *cell: s * layer.scaling)  # noqa: B023
    return mods


def found_in_scores(mods: Sequence[ScoreMod]) -> tuple[LateBinding, ...]:
    """Return what is found if each layer calls flex_attention with one score_mod."""
    kernels = [SimpleNamespace(arguments={"score_mod": mod}) for mod in mods]
    calls = [
        SimpleNamespace(layer=n, mask=None, kernel=one, module=MODULE)
        for n, one in enumerate(kernels)
    ]
    return find_late_bindings(cast(Any, calls))


@pytest.mark.parametrize(
    ("make", "variable"),
    [
        (lambda: on_layers(STRENGTHS), "index"),
        (in_a_list, "slope"),
        (in_a_dict_that_is_looked_up, "slope"),
    ],
    ids=["on layers", "in a list", "in a dict"],
)
def test_score_mods_that_share_the_variable_of_their_loop_are_found(
    make: Callable[[], list[ScoreMod]], variable: str
) -> None:
    (one,) = found_in_scores(make())
    assert (one.variable, one.of, one.layers) == (variable, "score_mod", (0, 1, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: on_layers(STRENGTHS, is_bound=True),
        lambda: on_layers(EQUAL),
        of_an_attribute_of_layers,
        of_layers_themselves,
    ],
    ids=["bound", "equal values", "an attribute of layers", "layers"],
)
def test_score_mods_whose_loop_gives_equal_values_or_their_own_are_not_found(
    make: Callable[[], list[ScoreMod]],
) -> None:
    assert found_in_scores(make()) == ()


def with_forwards(kind: str) -> list[Layer]:
    """Return layers whose forwards a loop made, as a program wraps attention modules."""
    layers = [Layer(n) for n in range(3)]
    for layer, window in zip(layers, WINDOWS, strict=True):

        def late(x: Tensor) -> Tensor:
            return x[:window]  # noqa: B023

        def bound(x: Tensor, window: int = window) -> Tensor:
            return x[:window]

        def of_layer(x: Tensor) -> Tensor:
            return x * layer.scaling  # noqa: B023

        layer.forward = {"late": late, "bound": bound, "layer": of_layer}[kind]
    return layers


@pytest.mark.parametrize("kind", ["late", "bound", "layer"])
def test_forwards_that_share_a_number_of_their_loop_are_found(kind: str) -> None:
    calls = [
        SimpleNamespace(layer=n, mask=None, kernel=None, module=layer)
        for n, layer in enumerate(with_forwards(kind))
    ]
    found = find_late_bindings(cast(Any, calls))
    expected = [("window", "forward", (0, 1, 2))] if kind == "late" else []
    assert [(one.variable, one.of, one.layers) for one in found] == expected
