"""What layers read from the cache is compared with what was written into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

from flexinspect_hooks.audit.caches.cache_beside_text import (
    cache_beside_text,
    cache_changes,
    mask_change,
)
from flexinspect_hooks.audit.evidence.cached_layers import CachedLayer
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence

N, SIZE = 6, 4


def keys(rows: int = 2, n: int = N, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, N + 4, SIZE, generator=generator)[:, :, :n]


def step(number: int, key: Tensor, value: Tensor, padding: Tensor | None = None) -> StepEvidence:
    n = key.shape[2]
    before, q_len = (0, n) if not number else (n - 1, 1)
    evidence = StepEvidence(
        *(0, number, q_len, before, torch.zeros(len(key), q_len, dtype=torch.long), None, padding),
        has_dense_mask=False,
        is_training=False,
        has_gradients=False,
    )
    version = key._version + value._version
    evidence.cached = {0: CachedLayer(key, value, version), 1: CachedLayer(key, value, version)}
    return evidence


def test_a_cache_that_only_grows_has_no_changes() -> None:
    steps = [step(0, keys(), keys(seed=1)), step(1, keys(n=N + 1), keys(n=N + 1, seed=1))]
    assert cache_changes(steps) == []


def test_batch_rows_that_changed_places_are_an_order() -> None:
    moved = [one[[1, 0]] for one in (keys(n=N + 1), keys(n=N + 1, seed=1))]
    (found,) = cache_changes([step(0, keys(), keys(seed=1)), step(1, *moved)])
    assert found.is_order
    assert found.step == 1
    assert "the cache of all layers" in found.text
    assert "its batch rows are now those of the rows 1, 0" in found.text


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (torch.tensor([0.5, 0.25])[:, None, None], "were multiplied by 0.5, 0.25 (by head)"),
        (
            torch.linspace(0.5, 2, 2 * SIZE).reshape(2, 1, SIZE),
            "0.5, 0.714, 0.929, 1.14, 1.36, 1.57, 1.79, 2 (by channel",
        ),
    ],
)
def test_keys_that_were_multiplied_have_their_factors(factor: Tensor, text: str) -> None:
    old, new = keys(1), keys(1, n=N + 1)
    new[:, :, :N] *= factor
    changes = cache_changes([step(0, old, keys(1, seed=1)), step(1, new, keys(1, n=N + 1, seed=1))])
    (found,) = changes
    assert text in found.text
    assert "as codes are that get the scale of newer rows" in found.text


def test_keys_of_other_values_have_no_factors() -> None:
    new = keys(1, n=N + 1)
    new[:, :, :N] += 0.1
    changes = cache_changes(
        [step(0, keys(1), keys(1, seed=1)), step(1, new, keys(1, n=N + 1, seed=1))]
    )
    assert "multiplied" not in changes[0].text


def test_keys_that_moved_without_their_values_are_no_order() -> None:
    moved = keys(n=N + 1)[[1, 0]]
    (found,) = cache_changes([step(0, keys(), keys(seed=1)), step(1, moved, keys(n=N + 1, seed=1))])
    assert not found.is_order
    assert "the keys of its batch rows are now those of the rows 1, 0" in found.text
    assert "the values stayed" in found.text


def test_rows_that_were_rewritten_are_described_and_values_of_another_scale_too() -> None:
    later = keys(n=N + 1).clone()
    later[0, :, 2:4] = later[0, :, 3:5].clone()
    scaled = keys(n=N + 1, seed=1) * 2
    (found,) = cache_changes([step(0, keys(), keys(seed=1)), step(1, later, scaled)])
    assert "differs only at the positions 2 to 3" in found.text
    assert "the values of the row 1 after it" in found.text
    assert "is 2 times the right one" in found.text


def test_tensors_that_were_written_to_since_are_passed_over() -> None:
    first, second = step(0, keys(), keys(seed=1)), step(1, keys(n=N + 1), keys(n=N + 1, seed=1))
    second.cached[0].key[0, 0, 0] = 9.0
    third = step(2, keys(n=N + 2), keys(n=N + 2, seed=1))
    assert cache_changes([first, second, third]) == []


def test_the_cache_beside_the_text_says_which_rows_are_wrong() -> None:
    right = {"keys": keys()[0], "values": keys(seed=1)[0]}
    mine = keys().clone()
    mine[0, :, 1] = 0
    evidence = step(1, mine, keys(seed=1))
    text = cache_beside_text(evidence, 0, 0, right, range(N), 1e-6)
    assert "of the cached keys 1 of 6 rows are wrong" in text
    assert "differs only at position 1, and there is zero there" in text
    assert "the cached values are right" in text


def test_the_mask_of_another_row_is_recognised() -> None:
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    before = step(0, keys(), keys(seed=1), padded)
    after = step(1, keys(n=N + 1), keys(n=N + 1, seed=1), torch.ones(2, N + 1))
    text = mask_change([before, after], after, 0)
    assert "opens columns that were closed, such as padding (0, 1)" in text
    assert "it is that of batch row 1 of the step before" in text
    assert mask_change([before, after], after, 1) == ""


@pytest.mark.parametrize("keeps_masks", [True, False])
def test_the_mask_of_a_row_that_moved_up_when_another_left_is_judged(
    audit: Audit, keeps_masks: bool
) -> None:
    model = make_model("llama")

    def program() -> None:
        text = torch.tensor([ids(10, seed) for seed in (3, 4, 5)])
        mask = torch.ones(3, 10, dtype=torch.long)
        text[2, :6], mask[2, :6] = 0, 0
        places = (mask.cumsum(1) - 1).clamp_min(0)
        output = model(text, attention_mask=mask, position_ids=places, use_cache=True)
        cache, places = output.past_key_values, places[:, -1:] + 1
        fed = output.logits[:, -1].argmax(-1, keepdim=True)
        keep = torch.tensor([0, 2])
        cache.batch_select_indices(keep)
        fed, places = fed[keep], places[keep]
        mask = mask[keep] if keeps_masks else mask[:2]
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
        model(fed, attention_mask=mask, position_ids=places, past_key_values=cache)

    _, findings, _ = audit(model, program)
    expected = [] if keeps_masks else [True]
    words = "it is that of batch row 0 of the step before, while the row in the cache was row 2"
    assert [words in one.sentence for one in findings] == expected


def test_values_that_change_their_scale_in_the_cache_are_named(audit: Audit) -> None:
    model = make_model("llama")

    class Scaled(DynamicCache):
        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            key, value = super().update(key, value, *args, **kwargs)
            return key, value * (1 if value.shape[2] <= 12 else 0.5)

    _, (finding,), _ = audit(model, lambda: decode_with(model, Scaled()))
    assert "the keys stayed, and the values of rows that were written before changed" in (
        finding.sentence
    )
    assert "the table is 0.5 times the right one" in finding.sentence


def decode_with(model: Any, cache: Any) -> None:
    """Decode greedily by hand with a cache."""
    rows = torch.tensor([ids(12, 3)])
    for _ in range(4):
        logits = model(rows, past_key_values=cache, use_cache=True).logits
        rows = logits[:, -1:].argmax(-1)
