"""Masks that depend on the head or the batch row: faults are found, correct masks are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.masked_traces import causal, model_on, own_attention, registered
from support.planting import of, one, planted, serious
from support.tiny import ids
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexinspect.records.finding import Severity
from flexinspect.rules.masks.heads_and_batches import find_odd_heads

MaskMod = Callable[[Any, Any, Any, Any], Any]
DOCUMENTS = torch.tensor([[0] * 12, [0] * 4 + [1] * 8, [0] * 8 + [1] * 4])
"""The document of each token, of three sequences."""


def prompts(n: int = 3) -> Tensor:
    return torch.tensor([ids(12, seed) for seed in range(n)])


def kernel(mask_mod: MaskMod, batch: int | None) -> Callable[..., Any]:
    """Return an attention function that builds its block mask with this B."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        made = create_block_mask(mask_mod, batch, None, q.shape[2], k.shape[2], "cpu")
        out = flex_attention(q, k, v, block_mask=made, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    return attention


def by_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) & (DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx])


def future_in_the_second(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) | (b == 1)


def test_a_mask_for_one_sequence_whose_mask_mod_depends_on_the_batch(tmp_path: Path) -> None:
    with registered(kernel(by_document, None)) as name:
        model = model_on(name)
        finding = one(planted(tmp_path, model, lambda: model(prompts())), "mask.ignores-batch")
    assert (finding.severity, finding.layers) == (Severity.WARNING, (0, 1, 2))
    assert finding.evidence["differ"] == [1, 2]
    assert finding.evidence["first"] == [1, 4, 0]
    assert finding.positions == (4,)
    assert "batch rows 1-2 of 3 differ from row 0, first at row 4, key 0 of batch row 1" in (
        finding.sentence
    )


@pytest.mark.parametrize(("mask_mod", "batch"), [(by_document, 3), (None, None)])
def test_a_mask_built_for_its_batch_makes_no_finding(
    tmp_path: Path, mask_mod: MaskMod | None, batch: int | None
) -> None:
    plain: MaskMod = mask_mod or (lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    with registered(kernel(plain, batch)) as name:
        model = model_on(name)
        found = planted(tmp_path, model, lambda: model(prompts()))
    assert [f.id for f in found if "batch" in f.id] == []
    assert serious(found) == []


def test_a_sequence_beyond_the_first_that_sees_the_future(tmp_path: Path) -> None:
    with registered(kernel(future_in_the_second, 3)) as name:
        model = model_on(name)
        finding = one(planted(tmp_path, model, lambda: model(prompts())), "mask.batch-future")
    assert finding.evidence["future"] == [0, 66, 0]
    assert "batch row 1 of 3 sees the future (66 pairs" in finding.sentence


def test_a_dense_mask_in_which_one_sequence_sees_the_future(tmp_path: Path) -> None:
    model = model_on("sdpa")
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    mask[2] = True
    found = planted(tmp_path, model, lambda: model(prompts(), attention_mask=mask))
    assert one(found, "mask.batch-future").evidence["differ"] == [2]
    assert of(found, "mask.future") == []


def test_a_padded_batch_makes_no_finding(tmp_path: Path) -> None:
    model, input_ids = model_on("sdpa"), prompts()
    input_ids[1, :3] = 0
    padding = (input_ids != 0).long()
    found = planted(
        tmp_path,
        model,
        lambda: model.generate(
            input_ids, attention_mask=padding, max_new_tokens=3, do_sample=False
        ),
    )
    assert [f.id for f in found if "batch" in f.id] == []


def test_a_head_with_a_mask_of_its_own_is_named_with_its_kv_head(tmp_path: Path) -> None:
    def first_key_alone(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((h != 2) | (kv == 0))

    with own_attention(first_key_alone, heads=4) as name:
        model = model_on(name)
        finding = one(planted(tmp_path, model, lambda: model(prompts(1))), "mask.by-head")
    assert (finding.severity, finding.head, finding.layers) == (Severity.NOTE, 2, (0, 1, 2))
    assert "query head 2 -> kv head 1 has other cells than the remaining 3" in finding.sentence


def test_a_mask_that_all_heads_share_has_no_odd_head(tmp_path: Path) -> None:
    with own_attention(causal, heads=4) as name:
        model = model_on(name)
        assert of(planted(tmp_path, model, lambda: model(prompts(1))), "mask.by-head") == []


def test_odd_heads_are_those_that_differ_from_most() -> None:
    cells = np.ones((4, 3, 3), np.bool_)
    assert find_odd_heads(cells) == []
    cells[1, 2, 2] = False
    assert find_odd_heads(cells) == [1]
