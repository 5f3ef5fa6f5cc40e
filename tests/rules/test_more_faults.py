"""Faults that other rules pass over: sequences of a batch, windows, scales, rows and small cuts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.masked_traces import causal, model_on, own_attention, prompt_ids, registered
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from flexinspect.records.finding import Finding, Severity
from flexinspect_hooks.debugger import python_mods

Planted = Callable[..., list[Finding]]

LENGTHS = (9, 6, 4)


def left_padded(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Return ids, padded on the left with 0, and their attention mask."""
    rows = [(0,) * (max(lengths) - n) + ids(n, seed) for seed, n in enumerate(lengths, 1)]
    batch = torch.tensor(rows)
    return batch, (batch != 0).long()


@pytest.fixture
def plant(tmp_path: Path) -> Planted:
    return lambda model, run, **watch: planted(tmp_path, model, run, **watch)


# -- sequences of a batch -----------------------------------------------------------------------


def test_a_batch_without_its_mask_is_recognized_by_its_ids(plant: Planted) -> None:
    model, (batch, _) = make_model("qwen2"), left_padded()
    finding = one(plant(model, lambda: model(batch)), "mask.batch-padding")
    assert (finding.severity, finding.layers) == (Severity.WARNING, (0, 1, 2))
    assert finding.evidence == {"rows": [1, 2], "pads": [3, 5]}
    assert "batch row 1 begins with 3 padding tokens" in finding.sentence


def test_a_mask_mod_that_reads_the_padding_of_the_first_sequence_for_all(plant: Planted) -> None:
    batch, mask = left_padded()

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, **kw: Any) -> Any:
        mask_mod = lambda b, h, i, j: (j <= i) & (mask[0, j] != 0)  # noqa: E731
        made = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], "cpu")
        out = flex_attention(q, k, v, block_mask=made, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name)
        found = plant(model, lambda: model(batch, attention_mask=mask))
    assert one(found, "mask.batch-padding").severity is Severity.ERROR


def arithmetic(closed: Callable[[int], Tensor] | None = None) -> Callable[..., Any]:
    """Return an attention in plain arithmetic that is causal without a mask.

    It closes `closed(n_keys)`, bool (batch, keys), by itself.
    """

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, **kw: Any) -> Any:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        n, m = q.shape[2], k.shape[2]
        scores, low = (q @ k.mT) * kw["scaling"], torch.finfo(q.dtype).min
        if given is not None:
            scores = scores + given
        else:
            scores = scores.masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), low)
        if closed is not None:
            scores = scores.masked_fill(closed(m)[:, None, None], low)
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    return attention


@pytest.mark.parametrize("lengths", [(9, 6, 4), (9, 9, 8)])
def test_an_attention_without_a_mask_function_is_named_where_rows_see_their_padding(
    plant: Planted, lengths: tuple[int, ...]
) -> None:
    batch, mask = left_padded(lengths)
    given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    with registered(arithmetic()) as name:
        model = model_on(name)
        finding = one(plant(model, lambda: model.generate(batch, **given)), "mask.batch-padding")
    assert "attention 'mine' has no mask function" in finding.sentence
    assert finding.severity is Severity.ERROR


def test_an_attention_that_closes_the_padding_by_itself_is_left_alone(plant: Planted) -> None:
    batch, mask = left_padded()

    def closed(n: int) -> Tensor:
        return F.pad(mask == 0, (0, n - mask.shape[1]))

    given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    with registered(arithmetic(closed)) as name:
        model = model_on(name)
        assert not of(plant(model, lambda: model.generate(batch, **given)), "mask.batch-padding")


def test_an_attention_with_a_mask_function_is_left_alone(plant: Planted) -> None:
    batch, mask = left_padded()
    given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    AttentionMaskInterface.register("mine", eager_mask)
    try:
        with registered(arithmetic()) as name:
            model = model_on(name)
            assert serious(plant(model, lambda: model.generate(batch, **given))) == []
    finally:
        AttentionMaskInterface._global_mapping.pop("mine")


def test_masks_that_are_handed_to_other_sequences(plant: Planted) -> None:
    model, (batch, mask) = model_on("sdpa"), left_padded((5, 9, 7))
    order = mask.sum(1).argsort(descending=True)
    cells = torch.ones(9, 9).tril().bool()[None, None] & mask[order].bool()[:, None, None]
    finding = one(plant(model, lambda: model(batch, attention_mask=cells)), "mask.padding")
    assert finding.positions == (4, 5, 6, 7, 8)


def test_sequences_whose_padding_is_closed_are_left_alone(plant: Planted) -> None:
    for number, cache in enumerate(("dynamic", "static")):
        model, (batch, mask) = model_on("sdpa"), left_padded((6, 9, 4))
        given = {"attention_mask": mask, "cache_implementation": cache, "max_new_tokens": 3}
        run = lambda model=model, batch=batch, given=given: model.generate(  # noqa: E731
            batch, do_sample=False, **given
        )
        assert serious(plant(model, run, name=str(number))) == []


def test_a_batch_without_a_cache_is_checked_by_the_step_whose_rows_were_recorded(
    plant: Planted,
) -> None:
    model, (batch, mask) = model_on("sdpa"), left_padded((9, 6, 4))
    given = {"attention_mask": mask, "use_cache": False, "max_new_tokens": 3}
    found = plant(model, lambda: model.generate(batch, do_sample=False, **given))
    assert serious(found) == []


def test_other_rows_of_a_mask_that_the_capture_did_not_record_are_not_checked(
    plant: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect_hooks.observers.attention.call_checks.MAX_SAMPLE_CELLS", 8)
    model, (batch, mask) = model_on("sdpa"), left_padded((9, 6, 4))
    assert serious(plant(model, lambda: model(batch, attention_mask=mask))) == []


def test_ids_that_count_padding_matter_where_positions_are_learnt(plant: Planted) -> None:
    (batch, mask), places = left_padded((4, 9)), torch.arange(9).expand(2, 9)
    severities = {}
    for family, more in (("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}), ("llama", {})):
        model = make_model(family, **more) if family == "llama" else _gpt2(more)
        run = lambda model=model: model(batch, attention_mask=mask, position_ids=places)  # noqa: E731
        severities[family] = one(plant(model, run, name=family), "positions.padding").severity
    assert severities == {"gpt2": Severity.WARNING, "llama": Severity.NOTE}


def _gpt2(more: dict[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, bos_token_id=1, eos_token_id=None, pad_token_id=0, **more)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


# -- windows, scales, rows ----------------------------------------------------------------------


def test_layers_that_lose_their_window(plant: Planted) -> None:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, scale=kw["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = make_model("mistral")
        model.set_attn_implementation(name)
        finding = one(plant(model, lambda: model(prompt_ids(12))), "mask.window-lost")
        assert serious(plant(model, lambda: model(prompt_ids(9)), name="short")) == []
    assert (finding.severity, finding.layers) == (Severity.WARNING, (0, 1, 2))
    assert finding.positions == (9, 10, 11)
    assert "holds 9 keys, but in step 0 3 rows see keys beyond it" in finding.sentence


@pytest.mark.parametrize(("before", "scale", "is_kept"), [(1, 1, True), (1, None, False)])
def test_a_scale_that_own_code_does_not_keep(
    plant: Planted, before: float, scale: float | None, is_kept: bool
) -> None:
    """The queries are scaled before the call; then the kernel's scale must be 1."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        q = q * kw["scaling"] * before
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name)
        found = of(plant(model, lambda: model(prompt_ids())), "attention.scale")
    assert (found == []) is is_kept
    if found:
        assert found[0].layers == (0, 1, 2)
        assert found[0].evidence["factor"] == pytest.approx(model.config.head_dim**-0.5, rel=1e-3)


def scoring(score_mod: Callable[[float], Any], scale: Callable[[float], float | None]) -> Any:
    """Register flex with a score_mod and a scale, each made from the requested scale."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        made = create_block_mask(
            lambda b, h, i, j: j <= i, None, None, q.shape[2], k.shape[2], "cpu"
        )
        scaling = kw["scaling"]
        out = flex_attention(
            *(q, k, v, score_mod(scaling), made), scale=scale(scaling), enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    return registered(attention)


SCORE_MODS: dict[str, tuple[Callable[[float], Any], Callable[[float], float | None], bool]] = {
    "instead of the kernel": (lambda c: lambda s, b, h, i, j: s * c, lambda c: 1.0, True),
    "as well as the kernel": (lambda c: lambda s, b, h, i, j: s * c, lambda c: c, False),
    "twice": (lambda c: lambda s, b, h, i, j: s * c * c, lambda c: 1.0, False),
    "lost, with a bias": (lambda c: lambda s, b, h, i, j: s - 0.1 * (i - j), lambda c: 1.0, False),
    "kept, with a bias": (lambda c: lambda s, b, h, i, j: s - 0.1 * (i - j), lambda c: c, True),
    "capped": (lambda c: lambda s, b, h, i, j: 30 * torch.tanh(s / 30), lambda c: 1.0, True),
    "by position": (lambda c: lambda s, b, h, i, j: s * (i + 1).log(), lambda c: c, True),
    "by head": (lambda c: lambda s, b, h, i, j: s * (h + 1), lambda c: c, True),
    "masked": (
        lambda c: lambda s, b, h, i, j: torch.where(j < i, s, -float("inf")),
        lambda c: c,
        True,
    ),
    "dropped": (lambda c: lambda s, b, h, i, j: 0 * s - (i - j), lambda c: 1.0, True),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_scale_in_a_score_mod(plant: Planted, name: str) -> None:
    score_mod, scale, is_kept = SCORE_MODS[name]
    with scoring(score_mod, scale) as own:
        model = model_on(own)
        found = of(plant(model, lambda: model(prompt_ids())), "attention.scale")
    assert (found == []) is is_kept
    if found:
        scaling = model.config.head_dim**-0.5
        off = scaling if name != "lost, with a bias" else 1 / scaling
        assert found[0].evidence["factor"] == pytest.approx(off, rel=1e-3)
        assert ("its `score_mod` multiplies by" in found[0].sentence) is (off == scaling)


def test_a_score_mod_is_not_called_where_a_debugger_would_stop_in_it(plant: Planted) -> None:
    python_mods.run_mods_as_python(lambda text: None)
    try:
        with scoring(*SCORE_MODS["twice"][:2]) as own:
            model = model_on(own)
            assert of(plant(model, lambda: model(prompt_ids())), "attention.scale") == []
    finally:
        python_mods.stop_running_mods()


def test_rows_that_do_not_see_themselves(plant: Planted) -> None:
    mask_mods = {
        "all": lambda layer, h, q, kv: kv < q,
        "some": lambda layer, h, q, kv: (kv <= q) & ((q < 3) | (q > 6) | (kv == 0)),
    }
    found = {}
    for name, mask_mod in mask_mods.items():
        with own_attention(mask_mod) as own:
            model = model_on(own)
            run = lambda model=model: model(prompt_ids())  # noqa: E731
            found[name] = one(plant(model, run, name=name), "decode.self-unseen")
    assert found["all"].sentence.startswith("No row of the prompt sees itself in all 3 layers")
    assert found["some"].positions == (3, 4, 5, 6)
    assert found["some"].severity is Severity.WARNING


def test_rows_and_keys_that_are_swapped_are_no_prefix(plant: Planted) -> None:
    with own_attention(lambda layer, h, q, kv: q <= kv) as name:
        model = model_on(name)
        swapped = one(plant(model, lambda: model(prompt_ids())), "mask.future")
    with own_attention(lambda layer, h, q, kv: (kv <= q) | (kv < 6)) as name:
        model = model_on(name)
        prefix = one(plant(model, lambda: model(prompt_ids()), name="prefix"), "mask.future")
    assert (swapped.severity, prefix.severity) == (Severity.ERROR, Severity.NOTE)


def test_segments_that_see_both_ways_and_each_other(plant: Planted) -> None:
    halves = lambda layer, h, q, kv: (kv <= q) | ((q < 11) == (kv < 11))  # noqa: E731
    with own_attention(halves) as name:
        model = model_on(name)
        run = lambda: model(prompt_ids())  # noqa: E731
        found = plant(model, run, segments=[(0, 11, "one"), (11, 22, "two")])
    assert "two sees one" in one(found, "mask.leak").sentence


# -- caches and forwards ------------------------------------------------------------------------


def crops(model: Any, cut: int) -> None:
    """Decode, with so many keys cut off once, as if drafts had been rejected."""
    cache, row = DynamicCache(config=model.config), prompt_ids(9)
    for step in range(5):
        row = model(row, past_key_values=cache).logits[:, -1:].argmax(-1)
        if step == 2 and cut:
            cache.crop(-cut)


@pytest.mark.parametrize(("cut", "n"), [(0, 0), (2, 1)])
def test_a_cache_that_is_cropped_while_the_text_continues(plant: Planted, cut: int, n: int) -> None:
    model = model_on("sdpa")
    found = of(plant(model, lambda: crops(model, cut)), "cache.lost")
    assert len(found) == n
    if found:
        assert "it held 11 and now holds 9, but the text continues" in found[0].sentence


def test_a_forward_with_gradients_is_recorded_like_any_other(plant: Planted) -> None:
    model = model_on("sdpa").requires_grad_(True)
    found = plant(model, lambda: model(prompt_ids()).logits.sum().backward())
    assert of(found, "observer.incomplete") == []
    assert serious(found) == []


def test_a_model_without_keys_loses_no_cache(plant: Planted) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = MambaForCausalLM(MambaConfig(**sizes, **tokens)).eval().requires_grad_(False)
    given = {"max_new_tokens": 5, "do_sample": False}
    assert serious(plant(model, lambda: model.generate(prompt_ids(8), **given))) == []


def test_a_bias_by_distance_is_not_taken_for_another_mask(plant: Planted) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2}
    tokens = {"num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None}
    model = T5ForConditionalGeneration(T5Config(**sizes, **tokens)).eval().requires_grad_(False)
    given = {"max_new_tokens": 3, "do_sample": False}
    assert serious(plant(model, lambda: model.generate(prompt_ids(8), **given))) == []


def test_a_mask_function_that_gave_no_mask_is_not_reported_as_missing(plant: Planted) -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionMaskInterface.register("with-masks", sdpa_mask)
    with registered(attention):
        from transformers import AttentionInterface

        AttentionInterface.register("with-masks", attention)
        model = model_on("with-masks")
        finding = one(plant(model, lambda: model(prompt_ids())), "mask.none")
    assert "has no mask function" not in finding.sentence


def test_a_causal_mask_mod_makes_no_finding(plant: Planted) -> None:
    with own_attention(causal) as name:
        model = model_on(name)
        assert serious(plant(model, lambda: crops(model, 0))) == []


# -- functions that a loop made -----------------------------------------------------------------


@pytest.mark.parametrize("is_bound", [False, True])
def test_score_mods_of_layers_that_a_loop_made(plant: Planted, is_bound: bool) -> None:
    slopes = (0.8, 0.4, 0.1)
    mods: dict[int, Callable[..., Tensor]] = {}
    for layer in range(3):
        slope = slopes[layer]
        if is_bound:
            mods[layer] = lambda s, b, h, q, kv, slope=slope: s - slope * (q - kv)
        else:
            mods[layer] = lambda s, b, h, q, kv: s - slope * (q - kv)  # noqa: B023

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, **kw: Any) -> Any:
        options = {"score_mod": mods[module.layer_idx], "block_mask": given}
        out = flex_attention(q, k, v, scale=kw["scaling"], enable_gqa=True, **options)
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name)
        found = of(plant(model, lambda: model(prompt_ids(9))), "mask.late-binding")
    texts = [one.sentence for one in found]
    assert ["score_mods" in text and "`slope` (0.1)" in text for text in texts] == [True] * (
        not is_bound
    )
