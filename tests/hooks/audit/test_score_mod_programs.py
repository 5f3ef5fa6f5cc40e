"""A program with a score_mod and keys of its own: what it means is followed, its offset is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.audits import Audit
from support.masked_traces import registered
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

N_PROMPT, N_KEYS = 14, 24
Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Score, position of the row and position of the key to the score that counts."""


def longer_is_sharper(score: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return score * (1 + row / 8)


def capped(score: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2) * (1 + (row - key) / 16)


@contextmanager
def program(change: Change, *, has_offset: bool) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield a model whose attention function keeps the keys, and a loop that decodes with it."""
    model = make_model("llama")
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    tables = torch.zeros(2, config.num_hidden_layers, 1, heads, N_KEYS, size)
    start = 0

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        first, n = start, q.shape[2]
        for table, new in zip(tables, (k, v), strict=True):
            table[module.layer_idx, :, :, first : first + n] = new
        moved = first if has_offset else 0

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return change(score, q_idx + moved, kv_idx)

        def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx <= q_idx + first

        own = [table[module.layer_idx] for table in tables]
        block_mask = create_block_mask(causal, None, None, n, N_KEYS, "cpu")
        scale = kw["scaling"]
        out: Any = flex_attention(
            q, *own, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def decode() -> None:
        nonlocal start
        given = torch.tensor([ids(N_PROMPT, 2)])
        for _ in range(4):
            positions = torch.arange(start, start + given.shape[1])[None]
            logits = model(given, position_ids=positions, use_cache=False).logits[:, -1]
            start += given.shape[1]
            given = logits.argmax(-1, keepdim=True)

    with registered(attention) as name:
        model.set_attn_implementation(name)
        yield model, decode


@pytest.mark.parametrize("change", [longer_is_sharper, capped])
def test_a_score_mod_that_goes_on_in_decode_steps_is_what_the_program_means(
    audit: Audit, change: Change
) -> None:
    with program(change, has_offset=True) as (model, decode):
        (verdict,), findings, _ = audit(model, decode)
    assert findings == []
    assert verdict.n_steps == 4
    assert "the program's score_mod is taken as it is" in verdict.notes


def test_a_score_mod_without_the_offset_of_the_keys_is_named(audit: Audit) -> None:
    with program(longer_is_sharper, has_offset=False) as (model, decode):
        _, (found,), _ = audit(model, decode)
    assert found.id == "audit.reproduced"
    assert "step 1: the numbers are those of a forward" in found.sentence
    assert "whose decode rows have the score_mod of row 0 (no offset)" in found.sentence


def test_a_program_whose_score_mod_changes_nothing_stays_without_a_note(audit: Audit) -> None:
    with program(lambda score, row, key: score * math.e / math.e, has_offset=True) as (
        model,
        decode,
    ):
        (verdict,), findings, _ = audit(model, decode)
    assert findings == []
    assert verdict.n_steps == 4
