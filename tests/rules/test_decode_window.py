"""A sliding window that has another size in decode steps than in the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ownmasks import attend_by, with_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PROMPT = torch.tensor([ids(15, 3)])


def windowed(model: Any, in_prompt: int, in_decode: int) -> None:
    """Attend within a window: by a mask in the prompt, and by fewer keys in decode steps."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        n, cells = key.shape[2], None
        if query.shape[2] == 1:
            key, value = key[:, :, -in_decode:], value[:, :, -in_decode:]
        else:
            distance = torch.arange(n)[:, None] - torch.arange(n)
            cells = (distance >= 0) & (distance < in_prompt)
        out = scaled_dot_product_attention(query, key, value, attn_mask=cells, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("windowed", attention)
    model.set_attn_implementation("windowed")


@pytest.mark.parametrize(("n", "word"), [(7, "larger"), (5, "smaller")])
def test_a_window_of_another_size_in_decode_steps_is_named(
    tmp_path: Path, n: int, word: str
) -> None:
    model = make_model("llama")
    windowed(model, 6, n)
    found = one(planted(tmp_path, model, lambda: with_cache(model, PROMPT)), "mask.window-uneven")
    assert (found.layers, found.step, found.positions) == ((0, 1, 2), 2, (16,))
    assert found.sentence == (
        "All 3 layers: each row of the prompt sees at most 6 keys, itself included, but the rows "
        f"of decode steps see {n}: the window is 1 {word} there."
    )


def test_a_window_of_one_size_is_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    windowed(model, 6, 6)
    assert serious(planted(tmp_path, model, lambda: with_cache(model, PROMPT))) == []


def test_other_masks_are_not_judged(tmp_path: Path) -> None:
    """A window with a sink in the prompt has no fixed number of keys that end with the row."""
    model = make_model("llama")

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        near = (keys <= rows) & (keys > rows - 6)
        return near | (keys == 0) & (rows < 15)

    attend_by(model, cells)
    found = planted(tmp_path, model, lambda: with_cache(model, PROMPT))
    assert of(found, "mask.window-uneven") == []
