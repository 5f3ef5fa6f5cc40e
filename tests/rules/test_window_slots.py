"""A window that is counted in positions, over the slots of a cache that has dropped keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ownmasks import with_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flexinspect.records.finding import Severity

FINDING, WINDOW = "mask.window-slots", 9
LAYERS = 3
FirstKey = Callable[[int, int], int]
"""The position that a mask takes for that of slot 0, by the tokens seen and the keys."""


def slot_zero(seen: int, n_keys: int) -> int:
    return 0


def true_position(seen: int, n_keys: int) -> int:
    return seen - n_keys


def attend_within(
    model: Any, first_key: FirstKey, *, window: int = WINDOW, crop: int | None = None
) -> None:
    """Attend within a window of positions; `crop` keeps so many keys, whatever the cache has."""
    seen = [0] * LAYERS

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        n, layer = query.shape[2], module.layer_idx
        seen[layer] += n
        if crop is not None and n == 1:
            key, value = key[:, :, -crop:], value[:, :, -crop:]
        m = key.shape[2]
        rows = torch.arange(seen[layer] - n, seen[layer])[:, None]
        keys = torch.arange(m) + first_key(seen[layer], m)
        cells = (keys <= rows) & (rows - keys < window)
        out = scaled_dot_product_attention(query, key, value, attn_mask=cells, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("within", attention)
    model.set_attn_implementation("within")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Generate with a tiny model under such a window, and return the findings."""

    def go(first_key: FirstKey, n_prompt: int, family: str = "mistral", **options: Any) -> Any:
        model = make_model(family)
        attend_within(model, first_key, **options)
        prompt = torch.tensor([ids(n_prompt, 3)])
        return planted(tmp_path, model, lambda: with_cache(model, prompt))

    return go


def test_rows_that_see_fewer_keys_in_each_step_are_named(run: Callable[..., Any]) -> None:
    found = one(run(slot_zero, 10), FINDING)
    assert (found.severity, found.layers) == (Severity.ERROR, (0, 1, 2))
    assert (found.step, found.positions) == (2, (11,))
    assert found.sentence == (
        "All 3 layers: the newest row sees 6 of the 9 keys in the cache, and the row before it saw "
        "7. The mask counts its window of 9 keys in positions of the sequence, but the cache holds "
        "the last 9 keys only, so its slot 0 is position 3, and each row sees one key less than "
        "the row before it."
    )
    assert found.evidence["dropped"] == 3


def test_a_text_that_outgrows_the_window_is_named_at_the_second_row(
    run: Callable[..., Any],
) -> None:
    found = one(run(slot_zero, 7), FINDING)
    assert (found.step, found.evidence["seen"], found.evidence["dropped"]) == (4, 7, 2)


def test_a_row_that_sees_no_key_follows_from_it(run: Callable[..., Any]) -> None:
    found = run(slot_zero, 16)
    assert one(found, FINDING).step == 2
    assert "sees none of the 9 keys" in one(found, FINDING).sentence
    empty = of(found, "mask.empty-row")[0]
    assert (empty.severity, empty.evidence["cause"]) == (Severity.NOTE, FINDING)


def test_a_window_that_no_configuration_has_is_that_of_the_kept_keys(
    run: Callable[..., Any],
) -> None:
    found = one(run(slot_zero, 10, "llama", crop=9), FINDING)
    assert (found.step, found.evidence["window"], found.evidence["seen"]) == (2, 9, 6)


@pytest.mark.parametrize("n_prompt", [7, 10, 16, 20])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_over_true_positions_is_not_reported(
    run: Callable[..., Any], n_prompt: int, family: str
) -> None:
    assert of(run(true_position, n_prompt, family), FINDING) == []


def test_a_smaller_window_is_not_reported(run: Callable[..., Any]) -> None:
    """Its rows see fewer keys than the cache holds, but as many in each step."""
    assert of(run(true_position, 10, window=6), FINDING) == []


def test_a_cache_that_keeps_all_keys_is_not_reported(run: Callable[..., Any]) -> None:
    assert serious(run(slot_zero, 12, "llama")) == []


def test_a_mask_that_opens_every_kept_key_is_not_reported(run: Callable[..., Any]) -> None:
    assert of(run(slot_zero, 10, window=100), FINDING) == []
