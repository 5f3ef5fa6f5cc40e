"""Decode rows with the mask of another row are found, with step, layers and counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import found_in_case
from support.ownmasks import attend_by, causal, isolated, with_cache, without_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from flexinspect.records.finding import Severity

PROMPT = 9
MINE = ("decode.no-offset", "decode.self-unseen", "decode.stale-row")


def prompt_ids(n: int = PROMPT, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Capture a run of a model and return the findings."""
    return lambda model, act, **watch: planted(tmp_path, model, act, **watch)


# -- the offset is missing -------------------------------------------------------------------------


def test_the_case_of_a_decode_row_without_an_offset_is_found_in_both_halves() -> None:
    found = found_in_case("k01_decode_without_offset")
    standalone, model = of(found, "decode.no-offset")
    assert (standalone.generation, standalone.severity) == (0, Severity.WARNING)
    assert standalone.positions == (8,)
    assert standalone.sentence == (
        "The only row of this call sees 1 of 9 keys, the first one: the mask counts its rows from "
        "0, but 8 keys come before them (with that offset the last row would see 9)."
    )
    assert (model.severity, model.step, model.layers) == (Severity.ERROR, 1, (0, 1))
    assert (model.times, model.last_step) == (3, 3)
    assert model.sentence.startswith("The mask counts the rows of step 1 from 0, not from 9: row 0")
    assert "sees 1 of 10 keys in all 2 layers; 10 expected (in step 0 it was 9 of 9)." in (
        model.sentence
    )
    assert model.evidence["seen_before"] == 9
    assert {finding.generation for finding in serious(found)} == {0, 2}  # not the repaired halves


@pytest.mark.parametrize("flex", [False, True])
def test_a_mask_without_offset_in_all_layers(run: Callable[..., Any], flex: bool) -> None:
    model = make_model("qwen3")
    attend_by(model, causal, flex=flex, first_row=lambda q, kv: 0)
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.no-offset")
    assert (finding.step, finding.layer, finding.layers) == (1, 0, (0, 1, 2))
    assert (finding.times, finding.positions) == (4, (PROMPT,))
    assert (finding.evidence["seen"], finding.evidence["expected"]) == (1, PROMPT + 1)


def test_sdpa_with_is_causal_for_one_row_in_one_layer(run: Callable[..., Any]) -> None:
    model = make_model("gpt_neox")

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        is_causal = query.shape[2] > 1 or module.layer_idx == 2
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=kwargs["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("always causal", attention)
    model.set_attn_implementation("always causal")
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.no-offset")
    assert (finding.layer, finding.layers, finding.severity) == (2, (), Severity.ERROR)
    assert f"sees 1 of {PROMPT + 1} keys in layer 2; {PROMPT + 1} expected" in finding.sentence


def test_one_head_of_one_layer_without_offset(run: Callable[..., Any]) -> None:
    model = make_model("llama")

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        whole = (keys <= rows).expand(4, len(rows), keys.shape[1]).clone()
        if len(rows) == 1 and layer == 1:
            whole[3] = keys <= 0
        return whole

    attend_by(model, cells)
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.no-offset")
    assert (finding.layer, finding.head, finding.step) == (1, 3, 1)
    assert "in layer 1, head 3; 10 expected" in finding.sentence


def test_a_chunk_of_rows_without_offset(run: Callable[..., Any]) -> None:
    model = make_model("llama")
    attend_by(model, causal, first_row=lambda q, kv: 0)

    def chunks() -> None:
        cache = model(prompt_ids()).past_key_values
        model(prompt_ids(3, 4), past_key_values=cache)

    finding = one(run(model, chunks), "decode.no-offset")
    assert (finding.step, finding.positions) == (1, (PROMPT + 2,))
    assert "row 2 of 3 (position 11" in finding.sentence
    assert "sees 3 of 12 keys" in finding.sentence


def test_an_offset_that_is_lost_in_the_middle_of_a_generation(run: Callable[..., Any]) -> None:
    model = make_model("phi3")
    attend_by(model, causal, first_row=lambda q, kv: kv - q if kv != PROMPT + 3 else 0)
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.no-offset")
    assert (finding.step, finding.times) == (3, 1)
    assert "(in step 2 it was 11 of 11)" in finding.sentence


# -- a row with the mask of an earlier row ---------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_an_offset_that_is_one_too_small(run: Callable[..., Any], family: str) -> None:
    model = make_model(family)
    attend_by(model, causal, first_row=lambda q, kv: kv - q - (q == 1))
    found = run(model, lambda: with_cache(model, prompt_ids()))
    finding = one(found, "decode.self-unseen")
    assert (finding.step, finding.layers, finding.times) == (1, (0, 1, 2), 4)
    assert finding.sentence.startswith("The newest row of step 1 (position 9")
    assert "does not see itself in all 3 layers: it sees 9 of 10 keys, up to position 8" in (
        finding.sentence
    )
    assert not of(found, "decode.stale-row")


def test_a_row_that_does_not_see_itself_once_is_reported_at_the_end(
    run: Callable[..., Any],
) -> None:
    model = make_model("qwen2")
    attend_by(model, causal, first_row=lambda q, kv: kv - q - (kv == PROMPT + 4))
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.self-unseen")
    assert (finding.step, finding.evidence["seen"], finding.times) == (4, PROMPT + 3, 1)


def test_a_mask_mod_with_a_captured_length_makes_rows_stale(run: Callable[..., Any]) -> None:
    model = make_model("llama")
    attend_by(model, lambda layer, rows, keys: (keys <= rows) & (keys < PROMPT + 1), flex=True)
    found = run(model, lambda: with_cache(model, prompt_ids()))
    finding = one(found, "decode.stale-row")
    assert (finding.step, finding.layers, finding.severity) == (2, (0, 1, 2), Severity.ERROR)
    assert finding.sentence.startswith(
        "From step 2 on, the newest row sees only keys up to position 9"
    )
    assert "in step 3 it sees 10 of 12 keys, but not itself; 12 expected." in finding.sentence
    assert not of(found, "decode.self-unseen")


def test_a_stale_row_of_one_layer_without_a_cache(run: Callable[..., Any]) -> None:
    model = make_model("llama")

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys <= rows) & ((keys < PROMPT) | (layer != 1))

    attend_by(model, cells)
    finding = one(run(model, lambda: without_cache(model, prompt_ids())), "decode.stale-row")
    assert (finding.step, finding.layer, finding.layers) == (1, 1, ())


def test_rows_that_see_the_prompt_and_themselves_but_nothing_generated(
    run: Callable[..., Any],
) -> None:
    model = make_model("llama")

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys <= rows) & ((keys < PROMPT) | (keys == rows))

    attend_by(model, cells)
    finding = one(run(model, lambda: with_cache(model, prompt_ids())), "decode.stale-row")
    assert (finding.step, finding.severity, finding.times) == (2, Severity.WARNING, 3)
    assert (
        "sees the prompt and itself, but not the 1 token generated before it in all 3 layers: "
        "10 of 11 keys; 11 expected."
    ) in finding.sentence


def test_without_a_captured_prompt_a_missing_offset_is_a_warning(run: Callable[..., Any]) -> None:
    model = make_model("llama")
    cache = model(prompt_ids()).past_key_values
    attend_by(model, causal, first_row=lambda q, kv: 0)
    (finding,) = of(
        run(model, lambda: model(prompt_ids(1), past_key_values=cache)), "decode.no-offset"
    )
    assert finding.severity is Severity.WARNING


# -- correct runs ----------------------------------------------------------------------------------


def generate(model: Any, prompt: Tensor, **options: Any) -> None:
    mask = options.pop("attention_mask", torch.ones_like(prompt))
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    model.generate(prompt, attention_mask=mask, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": True, "top_k": 5},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_no_generation_option_makes_a_finding(
    run: Callable[..., Any], family: str, options: dict[str, Any]
) -> None:
    model = make_model(family)
    found = serious(run(model, lambda: generate(model, prompt_ids(), **options)))
    assert [f.id for f in found] == []


def test_left_padding_makes_no_finding(run: Callable[..., Any]) -> None:
    model, prompt = make_model("llama"), torch.cat([prompt_ids(), prompt_ids(PROMPT, 4)])
    prompt[0, :4] = 0
    found = run(model, lambda: generate(model, prompt, attention_mask=(prompt != 0).long()))
    assert serious(found) == []


def test_a_mask_in_which_only_the_first_row_sees_itself_is_a_note(
    run: Callable[..., Any],
) -> None:
    model = make_model("llama")
    attend_by(model, lambda layer, rows, keys: (keys < rows) | (rows == 0) & (keys == 0))
    found = [f for f in run(model, lambda: with_cache(model, prompt_ids())) if f.id in MINE]
    assert [(f.id, f.severity) for f in found] == [("decode.self-unseen", Severity.NOTE)]


def test_a_layer_that_always_sees_only_the_first_key_makes_no_finding(
    run: Callable[..., Any],
) -> None:
    model = make_model("llama")
    attend_by(model, lambda layer, rows, keys: (keys <= rows) & ((layer != 1) | (keys == 0)))
    assert not [f for f in run(model, lambda: with_cache(model, prompt_ids())) if f.id in MINE]


@pytest.mark.parametrize(
    "cells",
    [
        lambda layer, rows, keys: (keys <= rows) & ((keys > rows - 3) | (keys < 2)),
        lambda layer, rows, keys: (keys <= rows) & (keys > rows - 2),
        lambda layer, rows, keys: (keys <= rows) & ((rows - keys) % 2 == 0),
        isolated([(1, 4), (4, 8)], 8),
    ],
    ids=["sinks and window", "window of two", "every other key", "segments"],
)
def test_masks_that_are_sparse_by_design_make_no_finding(
    run: Callable[..., Any], cells: Any
) -> None:
    model = make_model("llama")
    attend_by(model, cells)
    assert not [f for f in run(model, lambda: with_cache(model, prompt_ids(), 7)) if f.id in MINE]


def test_a_cropped_cache_makes_no_finding(
    run: Callable[..., Any],
) -> None:
    model = make_model("llama")

    def rewind() -> None:
        cache = model(prompt_ids()).past_key_values
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), past_key_values=cache)
        cache.crop(-2)
        model(torch.tensor([[9]]), past_key_values=cache)

    assert serious(run(model, rewind)) == []


def test_level_basic_makes_no_finding(run: Callable[..., Any]) -> None:
    model = make_model("llama")
    attend_by(model, causal, first_row=lambda q, kv: 0)
    found = run(model, lambda: with_cache(model, prompt_ids()), level="basic")
    assert not [finding for finding in found if finding.id in MINE]


def test_the_correct_decode_case_makes_no_finding() -> None:
    assert serious(found_in_case("c3_open_decode_row")) == []


@pytest.mark.parametrize("as_table", [False, True], ids=["4D masks", "2D masks"])
@pytest.mark.parametrize("broken", [True, False])
def test_generated_keys_after_right_padding_are_seen_by_each_batch_row(
    tmp_path: Path, broken: bool, as_table: bool
) -> None:
    model, width, lengths = make_model("llama"), 9, torch.tensor([9, 5, 7])
    tokens = torch.tensor([ids(width, 3)] * 3) * (torch.arange(width) < lengths[:, None])

    def bias(is_open: Tensor) -> Tensor:
        if as_table and is_open.shape[2] == 1:
            return is_open[:, 0, 0].long()
        return torch.zeros(is_open.shape).masked_fill(~is_open, torch.finfo(torch.float32).min)

    def run() -> None:
        real = torch.arange(width)[None] < lengths[:, None]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        options = {"past_key_values": DynamicCache(config=model.config), "use_cache": True}
        out = model(
            tokens,
            attention_mask=bias(causal[None, None] & real[:, None, None]),
            position_ids=torch.arange(width).expand(3, -1),
            **options,
        )
        newest = out.logits[torch.arange(3), lengths - 1]
        for step in range(3):
            columns = torch.arange(width + step + 1)[None]
            is_open = (columns < lengths[:, None]) | (columns >= width)
            if broken:
                is_open = columns <= lengths[:, None] + step
            newest = model(
                newest.argmax(-1, keepdim=True),
                attention_mask=bias(is_open[:, None, None]),
                position_ids=(lengths + step)[:, None],
                **options,
            ).logits[:, -1]

    found = serious(planted(tmp_path, model, run))
    if not broken:
        assert found == []
        return
    (finding,) = found
    assert finding.id == "decode.self-unseen"
    assert finding.sentence == (
        "The newest token of batch rows 1-2 does not see itself in step 1, as that of row 0 does: "
        "the mask closes column 9 and opens 6 columns up to 5 in row 1, 1 of them padding."
    )
