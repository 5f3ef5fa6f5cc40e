"""Rules of layers that a loop made: those that share its variable are found, others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
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

    calls = [SimpleNamespace(layer=n, mask=block_mask(rule)) for n, rule in enumerate(rules)]
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
