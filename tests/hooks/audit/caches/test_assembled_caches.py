"""Caches that a program puts together: their keys and values are looked up in earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

BOS = 1


def read(model: Any, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of a text that is read alone, by layer."""
    cache = DynamicCache()
    model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def moved(keys: Tensor, shift: int, base: float) -> Tensor:
    """Rotate keys (1, heads, rows, size) on by some positions."""
    size = keys.shape[-1]
    angles = shift / base ** (torch.arange(0, size, 2).float() / size)
    angles = torch.cat((angles, angles))
    first, second = keys.chunk(2, -1)
    return keys * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def join(parts: list[list[tuple[Tensor, Tensor]]], move: Callable[[Tensor, int], Tensor]) -> Any:
    """Join the caches of parts; those after the first lose their BOS."""
    joined = DynamicCache()
    for layer in range(len(parts[0])):
        keys, values = parts[0][layer]
        for part in parts[1:]:
            key, value = (one[:, :, 1:] for one in part[layer])
            keys = torch.cat((keys, move(key, keys.shape[2])), 2)
            values = torch.cat((values, value), 2)
        joined.update(keys, values, layer)
    return joined


def answer(model: Any, cache: Any, n: int = 3) -> None:
    """Go on with a question and some tokens."""
    rows = torch.tensor([ids(4, 20)])
    for _ in range(n):
        start = cache.get_seq_length()
        positions = torch.arange(start, start + rows.shape[1])[None]
        logits = model(rows, position_ids=positions, past_key_values=cache, use_cache=True).logits
        rows = logits[:, -1:].argmax(-1)


def joined_program(move: Callable[[Tensor, int], Tensor]) -> tuple[Any, Callable[[], None]]:
    model = make_model("llama")

    def run() -> None:
        parts = [read(model, [BOS, *ids(n, seed)]) for seed, n in ((1, 9), (2, 6), (3, 11))]
        answer(model, join(parts, move))

    return model, run


def found(audit: Audit, model: Any, run: Callable[[], None]) -> list[tuple[str, str]]:
    _, findings, _ = audit(model, run, kinds="cache.")
    mine = ("cache.moved-keys", "cache.other-values")
    return [(one.id, one.sentence) for one in findings if one.id in mine]


def test_keys_that_are_moved_to_their_place_are_right(audit: Audit) -> None:
    assert found(audit, *joined_program(lambda key, n: moved(key, n - 1, 1e4))) == []


def test_parts_that_keep_their_positions_may_be_meant(audit: Audit) -> None:
    assert found(audit, *joined_program(lambda key, n: key)) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (1, "by 10, so row 10 has position 11 after 9, and position 10 is free"),
        (-1, "by 8, so row 10 has position 9 after 9, and position 9 is taken twice"),
    ],
)
def test_keys_that_are_moved_too_far_or_not_far_enough_are_named(
    audit: Audit, error: int, words: str
) -> None:
    ((id_, sentence),) = found(
        audit, *joined_program(lambda key, n: moved(key, n - 1 + error, 1e4))
    )
    assert id_ == "cache.moved-keys"
    assert "In the cache that step 0 reads" in sentence
    assert f"from row 10 on they were moved {words}" in sentence


def test_keys_that_are_moved_with_another_base_are_named(audit: Audit) -> None:
    ((id_, sentence),) = found(audit, *joined_program(lambda key, n: moved(key, n - 1, 1e6)))
    assert id_ == "cache.moved-keys"
    assert "17 of 27 keys were moved with RoPE of base 1,000,000" in sentence
    assert "the model's base is 10,000" in sentence


def test_keys_that_are_changed_otherwise_are_not_judged(audit: Audit) -> None:
    assert found(audit, *joined_program(lambda key, n: key * 1.5)) == []


@pytest.mark.parametrize("broken", [True, False])
def test_values_of_other_tokens_than_their_keys_are_named(audit: Audit, broken: bool) -> None:
    model = make_model("llama")

    def run() -> None:
        rows, cache, position = torch.tensor([ids(20, 3)]), DynamicCache(), 0
        for _ in range(4):
            positions = torch.arange(position, position + rows.shape[1])[None]
            logits = model(rows, position_ids=positions, past_key_values=cache).logits
            position += rows.shape[1]
            for layer in cache.layers:
                kept = [0, 1, 2, 3, *range(layer.keys.shape[2] - 8, layer.keys.shape[2])]
                newest = range(layer.keys.shape[2] - 12, layer.keys.shape[2])
                layer.keys = layer.keys[:, :, kept]
                layer.values = layer.values[:, :, newest if broken else kept]
            rows = logits[:, -1:].argmax(-1)

    findings = found(audit, model, run)
    if not broken:
        assert findings == []
        return
    ((id_, sentence),) = findings
    assert id_ == "cache.other-values"
    assert sentence == (
        "In the cache that step 1 reads, 4 of 12 values are of other tokens than their keys: row 0 "
        "has the key of position 0 and the value of position 8."
    )
