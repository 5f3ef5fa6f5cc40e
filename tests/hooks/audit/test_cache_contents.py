"""What layers read from the cache is compared with what was written into it."""

from __future__ import annotations

import torch
from torch import Tensor

from flexinspect_hooks.audit.cache_contents import (
    cache_beside_text,
    cache_changes,
    mask_change,
)
from flexinspect_hooks.audit.evidence import CachedLayer, StepEvidence

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
