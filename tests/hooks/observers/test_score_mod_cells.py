"""A mask that is a score_mod is recorded as what it closes, in the prompt and in decode steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.masked_traces import PROMPT, isolated, model_on, prompt_ids, registered
from support.planting import of, planted, serious
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexinspect.trace.reader import open_trace
from flexinspect_hooks.observers.attention.score_mod_cells import ScoreModCells

CPU = torch.device("cpu")
DECLARED = isolated()


def closing(value: float, *, with_block_mask: bool = False) -> Any:
    """Return an attention function whose score_mod gives `value` where `isolated` is closed."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        offset = k.shape[2] - q.shape[2]

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            is_open = DECLARED(module.layer_idx, h, q_idx + offset, kv_idx)
            return torch.where(is_open, score, value)

        def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx <= q_idx + offset

        block_mask = None
        if with_block_mask:
            block_mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], "cpu")
        options = {"score_mod": score_mod, "block_mask": block_mask, "scale": kw.get("scaling")}
        out: Any = flex_attention(q, k, v, enable_gqa=True, **options)
        return out.transpose(1, 2).contiguous(), None

    return attention


def expected(rows: range, n_keys: int) -> Any:
    q, kv = torch.tensor([*rows])[:, None], torch.arange(n_keys)[None]
    return DECLARED(0, 0, q, kv).numpy()


@pytest.mark.parametrize("with_block_mask", [False, True])
@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_closed_cells_are_those_of_the_score_mod(
    tmp_path: Path, value: float, with_block_mask: bool
) -> None:
    with registered(closing(value, with_block_mask=with_block_mask)) as name:
        model = model_on(name)
        found = planted(
            tmp_path,
            model,
            lambda: model.generate(prompt_ids(), max_new_tokens=3, do_sample=False),
        )
    assert serious(found) == []
    assert not of(found, "mask.none")
    with open_trace(tmp_path / "planted.flextrace") as reader:
        for step, rows in ((0, range(PROMPT)), (1, range(PROMPT, PROMPT + 1))):
            for call in reader.calls(0, step):
                mask = reader.mask(call.mask)
                assert mask is not None
                assert mask.kind == ("block" if with_block_mask else "score_mod")
                assert mask.cells is not None
                np.testing.assert_array_equal(mask.cells[0], expected(rows, rows.stop))
        if not with_block_mask:
            assert mask.mask_mod is not None
            assert mask.mask_mod.endswith("score_mod")


def test_a_layer_whose_score_mod_closes_nothing_differs_from_the_others(tmp_path: Path) -> None:
    original = closing(-math.inf)

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        if module.layer_idx != 1:
            return original(module, q, k, v, mask, **kw)
        out: Any = flex_attention(q, k, v, scale=kw.get("scaling"), enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name)
        found = planted(tmp_path, model, lambda: model(prompt_ids()))
    (unmasked,) = of(found, "mask.none")
    assert unmasked.layer == 1
    assert "every cell is open" in unmasked.sentence


def mod(kind: str) -> Any:
    table = torch.tensor([0.0, -math.inf])

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if kind == "bias":
            return score - 0.1 * (q - kv)
        if kind == "cap":
            return 20 * torch.tanh(score / 20)
        if kind == "causal":
            return score + table[(kv > q).long()]
        if kind == "head":
            return score + table[((h == 1) & (kv > q)).long()]
        raise RuntimeError("of the user")

    return score_mod


@pytest.mark.parametrize("kind", ["bias", "cap", "error"])
def test_score_mods_that_close_nothing_are_evaluated_once(kind: str) -> None:
    cells, score_mod = ScoreModCells(), mod(kind)
    assert cells.may_close(score_mod)
    assert cells.open_cells(score_mod, 2, 4, 4, CPU) is None
    assert not cells.may_close(mod(kind))  # another closure of the same code
    assert not cells.closes(score_mod)


def test_a_generation_may_close_what_the_one_before_left_open(tmp_path: Path) -> None:
    limit = PROMPT

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.where(kv_idx < limit, score, -math.inf)

        out: Any = flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def run() -> None:
        nonlocal limit
        model(prompt_ids())
        limit = 3
        model(prompt_ids())

    with registered(attention) as name:
        model = model_on(name)
        planted(tmp_path, model, run)
    with open_trace(tmp_path / "planted.flextrace") as reader:
        masks = [reader.mask(reader.calls(number, 0)[0].mask) for number in (0, 1)]
    assert [one.kind for one in masks if one is not None] == ["none", "score_mod"]


def test_heads_may_differ() -> None:
    cells, score_mod = ScoreModCells(), mod("head")
    opened = cells.open_cells(score_mod, 2, 4, 4, CPU)
    assert opened is not None
    assert bool(opened[0].all())
    assert torch.equal(opened[1], torch.ones(4, 4, dtype=torch.bool).tril())
    assert cells.closes(score_mod)


def test_no_score_mod_closes_nothing_and_too_many_cells_are_not_evaluated() -> None:
    cells = ScoreModCells()
    assert not cells.may_close(None)
    assert not cells.closes(None)
    assert cells.open_cells(mod("causal"), 8, 1 << 14, 1 << 14, CPU) is None
    assert cells.may_close(mod("causal"))


def test_heads_of_large_masks_are_compared_in_some_rows() -> None:
    """One head of 1200 tokens is evaluated in parts, and stands for 32 equal ones."""
    cells, n = ScoreModCells(), 1200
    opened = cells.open_cells(mod("causal"), 32, n, n, CPU)
    assert opened is not None
    assert torch.equal(opened[0], torch.ones(n, n, dtype=torch.bool).tril())
    assert len(opened) == 1
    assert cells.open_cells(mod("head"), 32, n, n, CPU) is None
