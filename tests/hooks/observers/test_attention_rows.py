"""Rows recomputed in numpy from a capture at level extreme equal those of the dense reference."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import attention_row
from support.tiny import make_model, make_pieces

from flexinspect.masks import mask_presets
from flexinspect.panels.attention.attention_data import (
    AttentionData,
    AttentionOptions,
    load_attention,
)
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect.records.step import GenerationRecord, TokenRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource
from flexinspect_hooks.sessions.capture_session import CaptureSession

CPU = torch.device("cpu")
NEW = 5


def record(path: Path, model: Any, prompt: Prompt, *, patch: bool = True) -> Source:
    """Generate under segment isolation (or the model's own mask) and return the trace."""
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    source = SpecMaskSource(spec, length=128, device=CPU, compiled=False)
    with TraceWriter.create(path, {"model": "tiny"}) as writer:
        session = CaptureSession(model, writer, level="extreme")

        def chose(choice: Choice) -> None:
            pos = len(prompt.ids) + choice.step
            token = TokenRecord(pos, choice.token_id, "x", "x", pos, 6, step=choice.step)
            session.on_token_chosen(token, choice.scores)

        with session:
            session.begin_generation(
                GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ())
            )
            if patch:
                with FlexPatch(model, source, compiled=False):
                    generate(model, prompt, on_choice=chose, max_new_tokens=NEW)
            else:
                generate(model, prompt, on_choice=chose, max_new_tokens=NEW)
    return Source(TraceReader(path))


def show(
    source: Source, *, row: int | None = None, measure: str = "", **place: int
) -> AttentionData:
    return load_attention(source, Request(TracePlace(**place), AttentionOptions(measure, row)))


def reference(
    source: Source, step: int, layer: int, q_idx: int, cells: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return a row's weights in the dense reference, (heads, keys), from the recorded tensors."""
    reader = source.reader
    about = reader.step(0, step)
    assert about is not None
    parts = [reader.array(0, s, "k", layer) for s in range(step + 1)]
    key = torch.tensor(np.concatenate([part for part in parts if part is not None], axis=1))
    query = reader.array(0, step, "q", layer)
    assert query is not None
    row = torch.tensor(query[:, q_idx - about.kv_before][:, None])
    call = reader.calls(0, step)[layer]
    assert call.scale is not None
    visible = torch.tensor(cells[None])
    weights = attention_row(row, key, scale=call.scale, visible=visible, softcap=call.softcap)
    return weights[:, 0].numpy()


@pytest.fixture
def wide_prompt() -> Prompt:
    return compose_prompt(make_pieces(), max_new_tokens=NEW)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_rows_of_every_step_layer_and_head_equal_the_reference(
    tmp_path: Path, wide_prompt: Prompt, family: str
) -> None:
    source = record(tmp_path / "a.flextrace", make_model(family), wide_prompt)
    spec = mask_presets.preset("segment-isolation", wide_prompt.segments)
    for step in (0, 1, NEW - 1):
        q_idx = len(wide_prompt.ids) + step - 1
        cells = spec.dense(1, q_idx + 1, q_offset=q_idx)
        for layer in range(3):
            expected = reference(source, step, layer, q_idx, cells)
            for head in range(4):
                data = show(source, step=step, layer=layer, head=head)
                assert data.tokens is not None, data.missing_reason or data.mismatch
                np.testing.assert_allclose(data.tokens.weights, expected[head], atol=2e-5)
                assert data.lse_check.kind == "lse"
                assert data.lse_check.value is not None
                assert data.lse_check.value < 1e-4
                assert data.segment_attention is not None
                sums = [expected[head, s.start : s.stop].sum() for s in wide_prompt.segments]
                np.testing.assert_allclose(data.segment_attention, sums, atol=2e-5)


def test_every_row_of_the_prefill_equals_the_reference(tmp_path: Path, wide_prompt: Prompt) -> None:
    source = record(tmp_path / "a.flextrace", make_model("llama"), wide_prompt)
    spec = mask_presets.preset("segment-isolation", wide_prompt.segments)
    n = len(wide_prompt.ids)
    for q_idx in range(n - 1):
        cells = spec.dense(1, n, q_offset=q_idx)
        expected = reference(source, 0, 1, q_idx, cells)
        data = show(source, step=0, layer=1, head=3, row=q_idx)
        assert data.tokens is not None
        assert data.q_idx == q_idx
        np.testing.assert_allclose(data.tokens.weights, expected[3], atol=2e-5)
        assert not data.lse_check.is_checked
        assert data.newest_lse_check.value is not None
        assert data.newest_lse_check.value < 1e-4


def test_without_an_lse_of_the_kernel_the_output_is_checked(
    tmp_path: Path, wide_prompt: Prompt
) -> None:
    source = record(tmp_path / "a.flextrace", make_model("llama"), wide_prompt, patch=False)
    q_idx = len(wide_prompt.ids) + 1
    expected = reference(source, 2, 0, q_idx, np.ones((1, q_idx + 1), np.bool_))
    data = show(source, step=2, layer=0, head=1)
    assert data.tokens is not None
    np.testing.assert_allclose(data.tokens.weights, expected[1], atol=2e-5)
    assert data.lse_check.kind == "output"
    assert data.lse_check.value is not None
    assert data.lse_check.value < 1e-4


def test_keys_of_a_sliding_cache_are_those_in_the_layers_window(
    tmp_path: Path, wide_prompt: Prompt
) -> None:
    source = record(tmp_path / "a.flextrace", make_model("mistral"), wide_prompt, patch=False)
    for step in range(NEW):
        data = show(source, step=step, layer=1, head=2)
        assert data.tokens is not None, data.missing_reason or data.mismatch
        call = source.reader.calls(0, step)[1]
        assert len(data.tokens.weights) == call.kv_len
        assert int(data.tokens.open_keys.sum()) <= 9
        assert data.lse_check.value is not None
        assert data.lse_check.value < 1e-4
    assert data.tokens is not None
    assert data.tokens.first_pos > 0


@pytest.mark.parametrize("patch", [True, False])
def test_rows_of_a_capped_model_equal_the_reference(
    tmp_path: Path, wide_prompt: Prompt, patch: bool
) -> None:
    model = make_model("gemma2", attn_logit_softcapping=0.5)
    source = record(tmp_path / "a.flextrace", model, wide_prompt, patch=patch)
    for step in (0, 1, NEW - 1):
        q_idx = len(wide_prompt.ids) + step - 1
        for layer in range(3):
            call = source.reader.calls(0, step)[layer]
            assert call.softcap == 0.5
            mask = source.reader.mask(call.mask or "")
            assert mask is not None
            assert mask.cells is not None
            # Sliding layers may have dropped their oldest keys, which the reference still has.
            cells = np.zeros((1, q_idx + 1), np.bool_)
            cells[:, q_idx + 1 - call.kv_len :] = mask.cells[0, -1]
            expected = reference(source, step, layer, q_idx, cells)
            for head in range(4):
                data = show(source, step=step, layer=layer, head=head)
                assert data.tokens is not None, data.missing_reason or data.mismatch
                shown = expected[head, q_idx + 1 - call.kv_len :]
                np.testing.assert_allclose(data.tokens.weights, shown, atol=2e-5)
                assert data.lse_check.value is not None
                assert data.lse_check.value < 1e-4


def test_without_its_soft_cap_a_row_fails_the_check_and_is_not_drawn(
    tmp_path: Path, wide_prompt: Prompt
) -> None:
    model = make_model("gemma2", attn_logit_softcapping=0.5)
    path = tmp_path / "a.flextrace"
    record(path, model, wide_prompt).reader.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE calls SET softcap = NULL")
    data = show(Source(TraceReader(path)), step=1, layer=1, head=2)
    assert data.mismatch.startswith("This is not what ran")
    assert data.tokens is None


def test_half_precision_passes_the_lse_check(tmp_path: Path, wide_prompt: Prompt) -> None:
    model = make_model("llama").to(torch.bfloat16)
    source = record(tmp_path / "a.flextrace", model, wide_prompt)
    for step in range(NEW):
        for head in range(4):
            data = show(source, step=step, layer=2, head=head)
            assert data.tokens is not None, data.missing_reason or data.mismatch
            assert data.lse_check.value is not None
            assert data.lse_check.value < 1e-2
