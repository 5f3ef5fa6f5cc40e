"""Block tables that do not match their mask_mod, and masks of another batch or head count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.executed_masks import executed_mask
from support.masked_traces import causal, model_on, own_attention, prompt_ids, registered
from support.planting import one, planted, serious
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexinspect.masks import key_blocks, mask_presets
from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records.finding import Severity
from flexinspect.records.step import MaskRecord
from flexinspect.rules.masks.block_tables import find_stale_blocks

LONG = 300


def attention_with(make: Any) -> Any:
    """Return an attention function whose block mask comes from `make(layer, rows, keys)`."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        rows, keys = q.shape[2], k.shape[2]
        built = make(module.layer_idx, rows, keys)
        out = flex_attention(q, k, v, block_mask=built, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    return attention


def test_a_changed_captured_tensor_makes_the_tables_stale(tmp_path: Path) -> None:
    owner = torch.arange(512) // 100

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (owner[q] == owner[kv]) & (kv <= q)

    built = create_block_mask(mask_mod, None, None, LONG, LONG, "cpu")
    owner.fill_(0)
    with registered(attention_with(lambda *sizes: built)) as name:
        model = model_on(name, "llama")
        found = planted(tmp_path, model, lambda: model(prompt_ids(LONG)))
    finding = one(found, "mask.stale-tables")
    assert (finding.severity, finding.layers) == (Severity.WARNING, (0, 1, 2))
    assert "1 open block missing, first: rows 256-299, keys 0-127" in finding.sentence
    assert "uncompiled FlexAttention is correct, compiled it would follow the tables" in (
        finding.sentence
    )


def test_a_mask_mod_that_depends_on_the_head_with_tables_of_one_head(tmp_path: Path) -> None:
    def mask_mod(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((h > 1) | (q - kv < 20))

    with own_attention(mask_mod, heads=None) as name:
        model = model_on(name, "qwen2")
        found = planted(tmp_path, model, lambda: model(prompt_ids(LONG)))
    finding = one(found, "mask.ignores-head")
    assert (finding.severity, finding.head) == (Severity.WARNING, 2)
    assert finding.layers == (0, 1, 2)
    assert "for heads 2-3 of 4 its tables have 1 open block missing" in finding.sentence
    assert "rows 256-299, keys 0-127" in finding.sentence


def test_a_mask_for_the_kv_heads_has_the_wrong_size(tmp_path: Path) -> None:
    with own_attention(causal, heads=2) as name:
        model = model_on(name, "phi3")
        found = planted(tmp_path, model, lambda: model(prompt_ids()))
    finding = one(found, "mask.wrong-size")
    assert "2 heads (its KV heads), but the call has 4" in finding.sentence
    assert finding.layers == (0, 1, 2)


def test_a_mask_of_another_batch_has_the_wrong_size(tmp_path: Path) -> None:
    def make(layer: int, rows: int, keys: int) -> Any:
        return create_block_mask(lambda b, h, q, kv: kv <= q, 3, None, rows, keys, "cpu")

    with registered(attention_with(make)) as name:
        model = model_on(name)
        found = planted(
            tmp_path, model, lambda: model(torch.cat((prompt_ids(), prompt_ids(seed=4))))
        )
    finding = one(found, "mask.wrong-size")
    assert "batch 3, but the call has 2" in finding.sentence


def test_masks_for_one_or_all_heads_have_no_finding(tmp_path: Path) -> None:
    repeated_ids = torch.cat((prompt_ids(140), prompt_ids(140, seed=4)))
    for heads in (None, 1, 4):
        with own_attention(causal, heads=heads) as name:
            model = model_on(name)
            found = planted(tmp_path, model, lambda m=model: m(repeated_ids), name=f"heads{heads}")
        assert serious(found) == []


def record(spec: MaskSpec, n: int, *, of: MaskSpec | None = None, **changes: Any) -> MaskRecord:
    """Return a mask of n rows with the cells of a spec, and its tables (or those of spec `of`)."""
    cells = spec.dense(n)[None]
    tables = key_blocks.block_tables(of or spec, n, n)
    facts = {"cells": cells, "partial": tables.partial[None], "full": tables.full[None], **changes}
    return MaskRecord("f", "block", 1, 1, n, n, 0, block_q=128, block_kv=128, **facts)


ISOLATION = MaskSpec("two", (0, 200), (0, 0), (0, 200))


def test_tables_match_their_own_spec_at_any_length() -> None:
    for n in (1, 5, 127, 128, 129, 256, 300, 512):
        assert find_stale_blocks(record(mask_presets.causal(), n)) is None
        assert find_stale_blocks(record(ISOLATION, n)) is None


def test_tables_with_superfluous_partial_blocks_are_not_stale() -> None:
    wide = np.ones((1, 3, 3), np.bool_)
    assert find_stale_blocks(record(ISOLATION, 300, partial=wide, full=None)) is None


def test_full_blocks_that_the_spec_closes_are_found() -> None:
    stale = find_stale_blocks(record(ISOLATION, 384, of=mask_presets.causal()))
    assert stale is not None
    assert not stale.missing.any()
    assert np.argwhere(stale.extra).tolist() == [[0, 1, 0], [0, 2, 0], [0, 2, 1]]


def test_a_compiled_call_is_compared_by_the_block_states_of_its_mask_mod() -> None:
    opened = np.array([[[1, 0, 0], [2, 1, 0], [2, 2, 1]]], np.uint8)
    tables = key_blocks.block_tables(ISOLATION, 384, 384)
    cells = executed_mask(mask_presets.causal().dense(384), tables, (128, 128), compiled=True)[None]
    stale = find_stale_blocks(
        record(ISOLATION, 384, cells=cells, compiled=True, mask_mod_blocks=opened)
    )
    assert stale is not None
    assert np.argwhere(stale.missing).tolist() == [[0, 2, 0]]
    assert not stale.extra.any()
