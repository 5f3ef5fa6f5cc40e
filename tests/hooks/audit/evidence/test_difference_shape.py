"""A difference is named by its shape: a factor, an order, a rounding, and where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexinspect_hooks.audit.evidence.difference_shape import ComparedTensors, describe_difference

ROWS, HEADS, SIZE = 12, 4, 8


def table(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, HEADS * SIZE, generator=generator, dtype=torch.float64)


def described(ours: Tensor, heads: int = HEADS, **parts: Tensor) -> list[str]:
    named = {name.replace("_", " "): one for name, one in parts.items()}
    return describe_difference(ComparedTensors(ours, table(), 1e-6, range(len(ours)), heads, named))


def by_head(change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(table().view(ROWS, HEADS, SIZE)).flatten(1)


SHAPES: dict[str, tuple[Tensor, str]] = {
    "factor": (table() * 0.5, "is 0.5 times the right one"),
    "sign": (-table(), "has the opposite sign"),
    "zero": (table() * 0, "is zero there"),
    "vector": (table() + table(1)[0], "has the same vector added in each row"),
    "rows": (table().roll(1, 0), "has the values of other rows: 0 has those of 11"),
    "heads": (by_head(lambda t: t.flip(1)), "has its heads in reverse order"),
    "channels": (by_head(lambda t: t.flip(-1)), "the channels of each head in another order"),
    "clip": (table().clamp(-1, 1), "is cut off at -1 and 1"),
    "bfloat16": (table().bfloat16().double(), "has values of bfloat16 only"),
    "each row": (table() * torch.linspace(2, 3, ROWS)[:, None], "a factor of its own (2 to 3)"),
    "each channel": (table() * torch.linspace(1, 2, 32), "which is the same in all rows"),
    "rank": (table() + table(1)[:, :2] @ table(2)[:2], "has a difference of rank 2"),
    "int8": (
        (table() / table().abs().amax(1, keepdim=True) * 127).round()
        * table().abs().amax(1, keepdim=True)
        / 127,
        "has only multiples of a step, as values in int8",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_difference_is_named(name: str) -> None:
    ours, words = SHAPES[name]
    assert words in described(ours)[-1]


def test_equal_tables_have_no_shape_and_noise_has_no_name() -> None:
    assert described(table()) == []
    assert described(table() + 0.3 * table(7)) == []


def test_a_difference_in_some_rows_and_one_head_says_where() -> None:
    ours = table()
    ours[3:6, SIZE : 2 * SIZE] *= 2
    assert described(ours) == [
        "differs only at the positions 3 to 5",
        "differs only in head 1 of 4",
        "is 2 times the right one",
    ]


def test_rows_that_hold_rows_outside_of_the_wrong_ones_are_found() -> None:
    ours = table()
    ours[3:6] = table()[2]
    assert described(ours)[-1] == "has in each row the values of position 2"


def test_a_sum_of_parts_with_other_factors_is_named() -> None:
    one, other = 0.25 * table(), 0.75 * table()
    one = one + table(3)
    other = other - table(3)
    assert described(0.5 * one + other, the_input=one, the_output=other)[-1] == (
        "is 0.5 × the input + 1 × the output"
    )
