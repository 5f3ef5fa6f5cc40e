"""The patch runs FlexAttention, never falls back, and restores the model exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from support.tiny import make_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from flexinspect.core.errors import AttentionCallError, MaskError, ModelError
from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Prompt
from flexinspect_hooks.generation import flex_patch
from flexinspect_hooks.generation.decoding import generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource

CPU = torch.device("cpu")


def source(spec: mask_presets.MaskSpec | None = None) -> SpecMaskSource:
    return SpecMaskSource(spec or mask_presets.causal(), length=128, device=CPU, compiled=False)


def state(model: Any) -> tuple[Any, ...]:
    """Everything that a patch might leave changed."""
    return (
        model.config.to_dict(),
        [c._attn_implementation for c in flex_patch.model_configs(model)],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
        flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG,
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def test_a_patch_restores_the_model_exactly(llama: Any, prompt: Prompt) -> None:
    before = state(llama)
    with FlexPatch(llama, source()):
        generate(llama, prompt, max_new_tokens=2)
        assert state(llama) != before
    assert state(llama) == before


def test_a_patch_restores_the_model_after_an_exception(llama: Any, prompt: Prompt) -> None:
    before = state(llama)
    with pytest.raises(KeyError), FlexPatch(llama, source()):
        generate(llama, prompt, max_new_tokens=1)
        raise KeyError
    assert state(llama) == before


def test_nested_patches_restore_in_order(llama: Any, prompt: Prompt) -> None:
    input_ids = torch.tensor([prompt.ids])
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    before = state(llama)
    with torch.no_grad(), FlexPatch(llama, source(spec)):
        isolated = llama(input_ids).logits
        with FlexPatch(llama, source()):
            causal = llama(input_ids).logits
        again = llama(input_ids).logits
    assert torch.equal(isolated, again)
    assert not torch.allclose(isolated, causal)
    assert state(llama) == before


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the masks built and the kernel calls of all patches."""
    counts = Counter[str]()
    for owner, name in ((SpecMaskSource, "block_mask"), (FlexPatch, "_flex")):
        original = getattr(owner, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)
    return counts


def test_the_mask_is_built_once_per_step_and_never_per_layer(
    llama: Any, prompt: Prompt, calls: Counter[str]
) -> None:
    with FlexPatch(llama, source()):
        generate(llama, prompt, max_new_tokens=5)
    assert calls == {"block_mask": 5, "_flex": 5 * 3}


def test_models_with_sliding_layers_get_one_mask_per_layer_type(
    prompt: Prompt, calls: Counter[str]
) -> None:
    model = make_model("gemma2")
    with FlexPatch(model, source()):
        generate(model, prompt, max_new_tokens=3)
    assert calls == {"block_mask": 3 * 2, "_flex": 3 * 3}


def test_a_failing_flex_call_raises_and_names_layer_and_step(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FlexPatch._flex
    calls: list[int] = []

    def broken(self: FlexPatch, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("no kernel for this")
        return original(self, *args)

    monkeypatch.setattr(FlexPatch, "_flex", broken)
    before = state(llama)
    with pytest.raises(AttentionCallError, match=r"layer 1, step 1 \(rows 30 to 30\).*no kernel"):
        with FlexPatch(llama, source()):
            generate(llama, prompt, max_new_tokens=4)
    assert state(llama) == before


def test_a_padded_batch_is_refused(llama: Any) -> None:
    input_ids = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]])
    padded = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with pytest.raises(MaskError, match="padded"), FlexPatch(llama, source()):
        llama(input_ids, attention_mask=padded)


def test_a_model_outside_the_attention_interface_is_refused() -> None:
    class Other(nn.Module):
        pass

    with (
        pytest.raises(ModelError, match="Other does not use"),
        FlexPatch(Other(), source()),
    ):
        pass
    model = make_model("llama")
    type(model)._can_set_attn_implementation_cached_value = False
    try:
        with pytest.raises(ModelError, match="attention interface"), FlexPatch(model, source()):
            pass
    finally:
        del type(model)._can_set_attn_implementation_cached_value


def test_dropout_is_refused_rather_than_ignored(prompt: Prompt) -> None:
    model = make_model("llama", attention_dropout=0.5).train()
    with pytest.raises(AttentionCallError, match="dropout"), FlexPatch(model, source()):
        model(torch.tensor([prompt.ids]))
