"""Generation equals model.generate and a dense run, also with isolated segments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import dense_forward
from support.executed_masks import executed_mask
from support.tiny import FAMILIES, ids, make_model, make_pieces
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flexinspect.masks import key_blocks, mask_presets
from flexinspect.records.job import SamplingOptions
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect_hooks.generation import flex_patch
from flexinspect_hooks.generation.decoding import Choice, GenerationResult, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource

CPU = torch.device("cpu")
NEW = 8


def source(spec: mask_presets.MaskSpec) -> SpecMaskSource:
    return SpecMaskSource(spec, length=256, device=CPU, compiled=False)


def run(
    model: Any, prompt: Prompt, spec: mask_presets.MaskSpec, **options: Any
) -> tuple[list[int], list[torch.Tensor]]:
    logits: list[torch.Tensor] = []

    def keep(choice: Choice) -> None:
        logits.append(choice.logits.clone())

    with FlexPatch(model, source(spec)):
        out = generate(model, prompt, max_new_tokens=NEW, on_choice=keep, **options)
    return list(out.token_ids), logits


def windows_of(model: Any) -> dict[str, int] | None:
    """The sliding window of each layer type, None for a model without one."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    sliding = getattr(model.config, "sliding_window", None)
    if not sliding:
        return None
    sizes = {"full_attention": 10**6, "sliding_attention": sliding}
    return {kind: sizes[kind] for kind in kinds}


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_greedy_tokens_and_logits_equal_generate_under_sdpa(
    family: str, family_model: Callable[[str], Any], prompt: Prompt
) -> None:
    model = family_model(family)
    input_ids = torch.tensor([prompt.ids])
    theirs = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = run(model, prompt, mask_presets.causal())
    assert tokens == theirs.sequences[0, len(prompt.ids) :].tolist()
    for mine, other in zip(logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", mask_presets.PRESETS)
@pytest.mark.parametrize("positions", ["contiguous", "reset"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_preset_equals_a_dense_run_at_prefill_and_each_decode_step(
    name: str, positions: str, family: str, family_model: Callable[[str], Any]
) -> None:
    model = family_model(family)
    prompt = compose_prompt(make_pieces(), max_new_tokens=NEW, positions=positions)
    spec = mask_presets.preset(name, prompt.segments)
    tokens, logits = run(model, prompt, spec)
    whole = torch.tensor([[*prompt.ids, *tokens[:-1]]])
    positions = [*prompt.position_ids, *(prompt.next_position(i) for i in range(NEW - 1))]
    cells = spec.dense(whole.shape[1])
    dense = dense_forward(
        model, whole, torch.tensor([positions]), cells, windows=windows_of(model)
    ).logits[0]
    for step, mine in enumerate(logits):
        expected = dense[len(prompt.ids) - 1 + step]
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi3", "gpt_neox"])
def test_the_remaining_families_equal_a_dense_run_under_isolation(
    family: str, family_model: Callable[[str], Any], prompt: Prompt
) -> None:
    model = family_model(family)
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    tokens, logits = run(model, prompt, spec)
    whole = torch.tensor([[*prompt.ids, *tokens[:-1]]])
    rows = np.arange(whole.shape[1])
    cells = spec.dense(len(rows))
    if family == "mistral":  # all of its layers slide
        cells &= rows[:, None] - rows < model.config.sliding_window
    dense = dense_forward(model, whole, torch.from_numpy(rows)[None], cells).logits[0]
    for mine, expected in zip(logits, dense[-len(logits) :], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)


def test_isolated_separators_leave_empty_rows_that_stay_finite(llama: Any, prompt: Prompt) -> None:
    spec = mask_presets.preset("segment-isolation", prompt.segments, separators="isolated")
    assert np.count_nonzero(~spec.dense(len(prompt.ids)).any(axis=1)) == 3
    _, logits = run(llama, prompt, spec)
    assert all(torch.isfinite(row).all() for row in logits)


def hidden_states(model: Any, prompt: Prompt, spec: mask_presets.MaskSpec) -> list[torch.Tensor]:
    with FlexPatch(model, source(spec)), torch.no_grad():
        out = model(
            input_ids=torch.tensor([prompt.ids]),
            position_ids=torch.tensor([prompt.position_ids]),
            output_hidden_states=True,
        )
    return list(out.hidden_states)


@pytest.mark.parametrize("name", ["segment-isolation", "shared-prefix", "anchor-first", "document"])
def test_changing_one_paraphrase_leaves_the_others_bit_equal(llama: Any, name: str) -> None:
    before = compose_prompt(make_pieces(), max_new_tokens=1)
    changed = (ids(7, 1), ids(5, 77), ids(8, 3))
    after = compose_prompt(make_pieces(paraphrases=changed), max_new_tokens=1)
    spec = mask_presets.preset(name, before.segments)
    a, b = hidden_states(llama, before, spec), hidden_states(llama, after, spec)
    second = [s for s in before.segments if s.label in ("paraphrase 2", "separator 2")]
    moved = np.zeros(len(before.ids), bool)
    for segment in second:
        moved[segment.start : segment.stop] = True
    moved[next(s.start for s in before.segments if s.kind == "cue") :] = True
    still = torch.from_numpy(~moved)
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left[0, still], right[0, still])
    assert not torch.equal(a[-1][0, ~still], b[-1][0, ~still])


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
)


@needs_compiler
@pytest.mark.timeout(600)
def test_compiled_generation_equals_uncompiled_and_reports_compilation(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_patch, "_compiled_calls", {})
    prompt = compose_prompt(make_pieces(paraphrases=(ids(90, 1), ids(120, 2))), max_new_tokens=NEW)
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    _, expected = run(llama, prompt, spec)
    logits: list[torch.Tensor] = []
    compiled_kinds: list[str] = []
    made = SpecMaskSource(spec, length=256, device=CPU, compiled=True)
    with FlexPatch(llama, made, compiled=True, on_compile=compiled_kinds.append):
        generate(
            llama, prompt, max_new_tokens=NEW, on_choice=lambda c: logits.append(c.logits.clone())
        )
    assert compiled_kinds == ["prefill", "decode"]
    for mine, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@needs_compiler
@pytest.mark.timeout(600)
def test_the_executed_formula_is_that_of_the_compiled_kernel() -> None:
    length, size = 300, key_blocks.BLOCK_SIZE
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 16) for _ in range(3))
    segment = torch.arange(length) // 100

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (segment[q_idx] == segment[kv_idx]) & (kv_idx <= q_idx)

    def cells() -> np.ndarray[Any, Any]:
        return create_mask(mask_mod, 1, 1, length, length, device="cpu")[0, 0].numpy()

    block_mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    tables = key_blocks.stack_block_rows(cells()[a:b] for a, b in key_blocks.row_chunks(length))
    segment.copy_(torch.arange(length) // 280)  # the tables are stale from here on
    for compiled, call in ((False, flex_attention), (True, torch.compile(flex_attention))):
        shown = executed_mask(cells(), tables, (size, size), compiled=compiled)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(shown))
        result = call(q, k, v, block_mask=block_mask)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_sampling_is_seeded_and_goes_through_the_processors(llama: Any, prompt: Prompt) -> None:
    spec = mask_presets.causal()
    warm = SamplingOptions(do_sample=True, temperature=1.5, top_k=3)
    first, _ = run(llama, prompt, spec, sampling=warm, seed=1)
    again, _ = run(llama, prompt, spec, sampling=warm, seed=1)
    other, _ = run(llama, prompt, spec, sampling=warm, seed=2)
    assert first == again
    assert first != other


def test_sampled_scores_leave_only_top_k_tokens_open(llama: Any, prompt: Prompt) -> None:
    seen: list[torch.Tensor] = []

    def keep(choice: Choice) -> None:
        assert choice.scores is not None
        seen.append(choice.scores)

    with FlexPatch(llama, source(mask_presets.causal())):
        options = SamplingOptions(True, temperature=0.7, top_k=5, top_p=0.999)
        generate(llama, prompt, max_new_tokens=3, sampling=options, on_choice=keep)
    assert all(int(torch.isfinite(row).sum()) <= 5 for row in seen)


def test_generation_ends_at_eos(prompt: Prompt) -> None:
    model = make_model("llama")
    tokens, _ = run(model, prompt, mask_presets.causal())
    with FlexPatch(model, source(mask_presets.causal())):
        out = generate(model, prompt, max_new_tokens=NEW, eos_ids=(tokens[2],))
        assert generate(model, prompt, max_new_tokens=0) == GenerationResult((), "length")
    assert out.stop_reason == "eos"
    assert list(out.token_ids) == tokens[: tokens.index(tokens[2]) + 1]
