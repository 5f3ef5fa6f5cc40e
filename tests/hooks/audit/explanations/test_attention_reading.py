"""The output of an attention shows which heads, keys and weights made it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.explanations.attention_reading import HeadOutputs, read_attention

HEADS, KV_HEADS, N, SIZE = 4, 2, 10, 16


def right() -> HeadOutputs:
    generator = torch.Generator().manual_seed(0)

    def random(n: int) -> Tensor:
        return torch.randn(n, N, SIZE, generator=generator, dtype=torch.float64)

    query, key, value = random(HEADS), random(KV_HEADS), random(KV_HEADS)
    mask = torch.ones(1, N, N, dtype=torch.bool).tril()
    empty = torch.empty(0, dtype=torch.float64)
    plain = HeadOutputs(empty, empty, query, key, value, mask, SIZE**-0.5, tuple(range(N)), 1e-6)
    output = torch.stack([plain.output(h, h // 2, h // 2) for h in range(HEADS)], 1)
    return replace(plain, ours=output, theirs=output)


def with_weights(change: Callable[[Tensor], Tensor], heads: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    """Read an attention whose weights (rows, keys) were changed in some heads."""
    given = right()
    ours = given.ours.clone()
    for head in heads:
        ours[:, head] = change(given.weights(head, head // 2)) @ given.value[head // 2]
    return read_attention(replace(given, ours=ours))


def _without_key(key: int) -> Callable[[Tensor], Tensor]:
    def change(weights: Tensor) -> Tensor:
        left = weights.clone()
        left[key + 1 :, key] = 0
        return left / left.sum(-1, keepdim=True)

    return change


def _power(weights: Tensor) -> Tensor:
    powered = torch.where(weights > 0, weights.clamp_min(1e-30) ** 0.5, 0)
    return powered / powered.sum(-1, keepdim=True)


def _open(weights: Tensor) -> Tensor:
    """Let each row read the key after its own as well."""
    extra = torch.ones(N, N, dtype=torch.bool).triu(1).tril(1)
    scores = weights.log().masked_fill(extra, math.log(0.3))
    return scores.softmax(-1)


WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "uniform": (lambda w: (w > 0).double() / (w > 0).sum(-1, keepdim=True), "have the same weight"),
    "factor": (lambda w: w * 0.5, "they are 0.5 times the right ones"),
    "scaled scores": (_power, "scores that are 0.5 times the right ones"),
    "small ones cut": (
        lambda w: w.masked_fill(w < 0.05, 0),
        "are zero, and the others are not raised",
    ),
    "a key is missing": (_without_key(2), "do not read the key of position 2"),
    "a later key is open": (_open, "read the key 1 after their own"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_the_softmax_are_read(name: str) -> None:
    change, words = WEIGHTS[name]
    assert words in with_weights(change)


def test_a_difference_in_one_head_names_that_head() -> None:
    assert "(in head 2 only)" in with_weights(lambda weights: weights * 0.5, (2,))


def test_heads_that_read_other_heads_are_named() -> None:
    given = right()
    ours = given.ours.clone()
    ours[:, 1] = given.output(1, 1, 1)
    ours[:, 2] = given.output(2, 1, 0)
    text = read_attention(replace(given, ours=ours))
    assert "head 1 uses key and value head 1, not 0" in text
    assert "head 2 uses value head 0, not 1" in text
    assert "the other 2 heads are right" in text


def test_a_right_output_and_values_of_their_own_are_not_read() -> None:
    given = right()
    assert read_attention(given) == ""
    noise = torch.randn(N, HEADS, SIZE, generator=torch.Generator().manual_seed(5))
    assert read_attention(replace(given, ours=given.ours + noise.double())) == ""
