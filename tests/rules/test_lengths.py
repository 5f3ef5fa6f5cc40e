"""Masks and keys of other lengths than their call are found; matching ones make no finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.flex_attention as theirs
from support.planting import one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache

from flexinspect.records.finding import Finding, Severity


def prompt(n: int = 9, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def decode(model: Any, input_ids: Tensor, n: int = 4) -> None:
    cache = DynamicCache(config=model.config)
    for _ in range(n):
        input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)


def causal(rows: int, keys: int, batch: int | None = None, heads: int | None = None) -> Any:
    off = keys - rows
    rule = lambda b, h, i, j: j <= i + off  # noqa: E731
    return create_block_mask(rule, batch, heads, rows, keys, "cpu")


def about_lengths(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.id.startswith("lengths.")]


@pytest.fixture
def own() -> Iterator[Callable[..., Any]]:
    """Register an attention whose mask comes from `make(layer, rows, keys)`; return a model."""
    names = []

    def model_with(make: Callable[..., Any], family: str = "llama", **kernel: Any) -> Any:
        run = kernel.get("run", flex)

        def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
            made = make(module.layer_idx, q.shape[2], k.shape[2])
            return run(q, k, v, made, kw["scaling"]).transpose(1, 2).contiguous(), None

        name = f"own{len(names)}"
        names.append(name)
        AttentionInterface.register(name, attention)
        model = make_model(family)
        model.set_attn_implementation(name)
        return model

    yield model_with
    for name in names:
        AttentionInterface._global_mapping.pop(name)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def patient(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    with suppress(Exception):
        return flex(q, k, v, mask, scale)
    is_causal = q.shape[2] > 1
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )


# -- a mask of another length ----------------------------------------------------------------------


def test_a_mask_built_before_the_cache_grew_is_found_despite_a_suppressed_exception(
    tmp_path: Path, own: Any
) -> None:
    """Only layer 1, and only in decode steps."""
    short = lambda layer, rows, keys: causal(rows, keys - (layer == 1 and rows == 1))  # noqa: E731
    model = own(short, run=patient)
    found = planted(tmp_path, model, lambda: decode(model, prompt()))
    first = one(found, "lengths.mask-kv")
    assert (first.severity, first.layer, first.step) == (Severity.ERROR, 1, 1)
    assert first.sentence == (
        "KV length 10 but mask built for 9 (layer 1, step 1; cache holds 9 before, 10 after): "
        "flex_attention raised ValueError."
    )


def test_a_prompt_mask_reused_for_decode_steps_is_found_with_both_lengths(
    tmp_path: Path, own: Any
) -> None:
    kept: list[Any] = []

    def first(layer: int, rows: int, keys: int) -> Any:
        kept.append(causal(rows, keys))
        return kept[0]

    model = own(first)
    found = planted(tmp_path, model, lambda: _quiet(lambda: decode(model, prompt())))
    finding = one(found, "lengths.mask-kv")
    assert "KV length 10 but mask built for 9, and q length 1 but mask built for 9 rows" in (
        finding.sentence
    )


def _quiet(run: Callable[[], None]) -> None:
    with suppress(ValueError, RuntimeError):
        run()


def test_a_mask_of_another_number_of_rows_is_found(tmp_path: Path, own: Any) -> None:
    model = own(lambda layer, rows, keys: causal(rows + 1, keys))
    found = planted(tmp_path, model, lambda: _quiet(lambda: decode(model, prompt())))
    finding = one(found, "lengths.mask-q")
    assert finding.sentence == (
        "q length 9 but mask built for 10 rows (layer 0, step 0): flex_attention raised ValueError."
    )


def test_a_dense_mask_that_sdpa_rejects_is_found(tmp_path: Path, own: Any) -> None:
    def late(layer: int, rows: int, keys: int) -> Tensor:
        return torch.ones(1, 1, rows, 12 if layer == 2 and keys == 11 else keys, dtype=torch.bool)

    model = own(late, "qwen2", run=dense)
    found = planted(tmp_path, model, lambda: _quiet(lambda: decode(model, prompt())))
    finding = one(found, "lengths.mask-kv")
    assert (finding.layer, finding.step) == (2, 2)
    assert "KV length 11 but mask built for 12 (layer 2, step 2; cache holds 10 before" in (
        finding.sentence
    )


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_a_mask_that_eager_attention_rejects_is_found(tmp_path: Path, level: str) -> None:
    model = make_model("gpt_neox")
    model.set_attn_implementation("eager")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        input_ids = model(prompt(), past_key_values=cache).logits[:, -1:].argmax(-1)
        model(input_ids, past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 9))

    found = planted(tmp_path, model, lambda: _quiet(run), level=level)
    finding = one(found, "lengths.mask-kv")
    assert finding.sentence == (
        "KV length 10 but mask built for 9 (layer 0, step 1; cache holds 9 before, 10 after): "
        "eager raised RuntimeError."
    )


def test_a_square_mask_that_flex_attention_reads_at_row_0_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not rejected: transformers' flex attention reads the upper left corner."""
    plain = lambda *args, training=False, **kwargs: flex_attention(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", plain)
    model = make_model("llama")
    model.set_attn_implementation("flex_attention")
    closed = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)[None, None]

    def run() -> None:
        cache = DynamicCache(config=model.config)
        output = model(prompt(), past_key_values=cache, attention_mask=closed)
        token = output.logits[:, -1:].argmax(-1)
        model(token, past_key_values=cache, attention_mask=closed)

    finding = one(planted(tmp_path, model, run), "lengths.mask-q")
    assert (finding.severity, finding.step, finding.layers) == (Severity.ERROR, 1, (0, 1, 2))
    assert finding.sentence.startswith(
        "All 3 layers received a dense mask of 12 rows in step 1, which has 1 row (position 9"
    )


# -- batch and heads -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "heads", "text"),
    [
        (None, 2, "2 heads (its KV heads), but the call has 4"),
        (2, None, "batch 2, but the call has 3"),
        (2, 3, "batch 2, but the call has 3, and for 3 heads, but the call has 4"),
    ],
)
def test_a_mask_of_another_batch_or_head_count_is_found(
    tmp_path: Path, own: Any, batch: int | None, heads: int | None, text: str
) -> None:
    model = own(lambda layer, rows, keys: causal(rows, keys, batch, heads))
    input_ids = prompt().repeat(3, 1)
    finding = one(planted(tmp_path, model, lambda: decode(model, input_ids)), "lengths.batch-heads")
    assert (finding.severity, finding.step, finding.layers) == (Severity.WARNING, 0, (0, 1, 2))
    assert text in finding.sentence


def test_one_layer_with_a_mask_of_another_batch_is_named(tmp_path: Path, own: Any) -> None:
    made = lambda layer, rows, keys: causal(rows, keys, 5 if layer == 1 else None)  # noqa: E731
    model = own(made)
    run = lambda: decode(model, prompt().repeat(2, 1))  # noqa: E731
    finding = one(planted(tmp_path, model, run, level="basic"), "lengths.batch-heads")
    assert (finding.layer, finding.layers) == (1, ())


# -- keys per layer --------------------------------------------------------------------------------


def cropping(module_layer: int, cut: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return an SDPA function that passes only some keys to one layer in decode steps."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        if module.layer_idx == module_layer and q.shape[2] == 1:
            k, v = cut(k), cut(v)
        is_causal = q.shape[2] > 1
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=kw["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    return attention


@pytest.mark.parametrize(
    ("layer", "cut", "step", "text"),
    [
        (1, lambda t: t[:, :, -5:], 1, "gets 5 keys in step 1, the others get 10, and the cache "),
        (2, lambda t: t[:, :, :-1], 2, "because the previous step lacked 1 as well"),
        (0, lambda t: t[:, :, 2:], 1, "because the last row of the prompt saw 8 keys back"),
    ],
    ids=["window", "without the newest", "without the first"],
)
def test_a_layer_that_receives_fewer_keys_than_the_others_is_named(
    tmp_path: Path, layer: int, cut: Any, step: int, text: str
) -> None:
    AttentionInterface.register("cropping", cropping(layer, cut))
    try:
        model = make_model("llama")
        model.set_attn_implementation("cropping")
        found = planted(tmp_path, model, lambda: decode(model, prompt(), 5))
    finally:
        AttentionInterface._global_mapping.pop("cropping")
    finding = one(found, "lengths.layer-keys")
    assert (finding.severity, finding.layer, finding.step) == (Severity.ERROR, layer, step)
    assert text in finding.sentence


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_generation_makes_no_finding_in_any_family(tmp_path: Path, family: str, level: str) -> None:
    """Some families have windows of 9 keys, shorter than the prompt, in some or all layers."""
    model = make_model(family)
    run = lambda: model.generate(prompt(14), max_new_tokens=5, do_sample=False)  # noqa: E731
    assert serious(planted(tmp_path, model, run, level=level)) == []


def test_static_caches_with_windows_make_no_finding(tmp_path: Path) -> None:
    model = make_model("gemma2")
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 5}
    run = lambda: model.generate(prompt(14), do_sample=False, **options)  # noqa: E731
    assert serious(planted(tmp_path, model, run)) == []


def test_a_mask_of_one_batch_and_head_fits_all(tmp_path: Path, own: Any) -> None:
    model = own(lambda layer, rows, keys: causal(rows, keys))
    found = planted(tmp_path, model, lambda: decode(model, prompt().repeat(3, 1)))
    assert about_lengths(found) == []


def test_a_mask_for_each_batch_and_head_fits(tmp_path: Path, own: Any) -> None:
    model = own(lambda layer, rows, keys: causal(rows, keys, 3, 4))
    found = planted(tmp_path, model, lambda: decode(model, prompt().repeat(3, 1)))
    assert about_lengths(found) == []


def test_a_kernel_that_fails_for_another_reason_makes_no_finding(tmp_path: Path, own: Any) -> None:
    def broken(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        raise MemoryError("no more")

    def made(layer: int, rows: int, keys: int) -> Any:
        mask = causal(rows, keys)
        mask.mask_mod = broken
        return mask

    model = own(made)
    found = planted(tmp_path, model, lambda: _failing(model))
    assert about_lengths(found) == []


def _failing(model: Any) -> None:
    with pytest.raises(Exception, match=r"no more|Unsupported|raise"):
        model(prompt())


def test_a_larger_dense_mask_is_correct_for_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lambda *args, training=False, **kwargs: flex_attention(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", plain)
    model = make_model("llama")
    model.set_attn_implementation("flex_attention")
    closed = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)[None, None]
    run = lambda: model(prompt(), attention_mask=closed, use_cache=False)  # noqa: E731
    assert about_lengths(planted(tmp_path, model, run)) == []
