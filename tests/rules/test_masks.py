"""Executed masks against declared masks: planted faults are found, correct runs have no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.masked_traces import (
    PROMPT,
    SEGMENTS,
    causal,
    generated,
    isolated,
    model_on,
    only_in,
    own_attention,
    prompt_ids,
    registered,
)
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.masks.declared_vs_executed import MasksRule

ISOLATED: dict[str, Any] = {"segments": SEGMENTS, "mask": "segment-isolation"}


def run_own(tmp_path: Path, rule: Any, *, family: str = "llama", n: int = 4, **watch: Any) -> Any:
    """Generate with a custom mask_mod under capture, and return the findings."""
    attention = {name: watch.pop(name) for name in ("heads", "failing") if name in watch}
    with own_attention(rule, **attention) as name:
        model = model_on(name, family)
        return planted(tmp_path, model, lambda: generated(model, prompt_ids(), n), **watch)


def of_masks(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.id in MasksRule.findings]


# -- faults ---------------------------------------------------------------------------------------


def test_a_causal_mask_instead_of_three_isolated_segments_is_one_piece(tmp_path: Path) -> None:
    finding = one(run_own(tmp_path, causal, **ISOLATED), "mask.merged")
    assert finding.severity is Severity.ERROR
    assert (finding.step, finding.layers) == (0, (0, 1, 2))
    assert (
        "1 block-diagonal piece, but the declared mask (segment-isolation) keeps 3 segments apart"
    ) in finding.sentence
    assert "position 7" in finding.sentence
    assert finding.evidence["leaked"] == 5 * 7 + 8 * 12 + 6


def test_one_layer_without_the_declared_mask_is_named(tmp_path: Path) -> None:
    found = run_own(tmp_path, only_in(2, causal, isolated()), **ISOLATED)
    (finding,) = of_masks(found)
    assert (finding.severity, finding.layer, finding.step) == (Severity.ERROR, 2, 0)
    assert finding.sentence.startswith("Layer 2 ran")


def test_a_layer_that_fell_back_is_named_with_the_suppressed_exception(tmp_path: Path) -> None:
    found = run_own(tmp_path, isolated(), failing=(1,), **ISOLATED)
    (finding,) = of_masks(found)
    assert (finding.id, finding.layer) == ("mask.not-applied", 1)
    assert (
        "causal SDPA without a mask after RuntimeError: no kernel for this layer was suppressed"
    ) in finding.sentence


def test_a_head_that_sees_another_segment_is_named(tmp_path: Path) -> None:
    usual = isolated()

    def rule(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return usual(layer, h, q, kv) | ((h == 3) & (q >= 12) & (kv >= 7) & (kv < 9) & (kv <= q))

    finding = one(run_own(tmp_path, rule, heads=4, **ISOLATED), "mask.leak")
    assert finding.head == 3
    assert "in head 3 of 4" in finding.sentence
    assert finding.evidence["leaked"] == 8 * 2
    assert "position 12" in finding.sentence
    assert "third" in finding.sentence
    assert "second" in finding.sentence


def test_generated_rows_that_see_too_much_are_counted_over_the_steps(tmp_path: Path) -> None:
    rule = isolated(reader=22)  # the cue sees only itself, and generated rows see everything
    declared = MaskSpec("own", (0, 1, 7, 12, 20), (0, 0, 0, 0, 0), (0, 1, 7, 12, 20))
    found = run_own(tmp_path, rule, n=6, segments=SEGMENTS, mask=declared)
    (finding,) = of_masks(found)
    assert finding.id in ("mask.merged", "mask.leak", "mask.not-applied")
    assert (finding.step, finding.times, finding.last_step) == (1, 5, 5)
    assert finding.positions == (22,)


def test_rows_that_see_one_key_ahead_see_the_future_without_a_declared_mask(
    tmp_path: Path,
) -> None:
    def rule(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q + 1

    finding = one(run_own(tmp_path, rule, family="qwen2"), "mask.future")
    assert finding.severity is Severity.ERROR
    assert "rows 0-20 see the future (21 pairs)" in finding.sentence
    assert finding.layers == (0, 1, 2)


def test_a_mask_that_is_not_causal_is_reported_as_future_and_not_as_leak(tmp_path: Path) -> None:
    owner = torch.zeros(512, dtype=torch.long)
    for number, (start, stop, _) in enumerate(SEGMENTS):
        owner[start:stop] = number + 1

    def mask_mod(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return (owner[q] == owner[kv]) | ((q >= 20) & (kv <= q))

    (finding,) = of_masks(run_own(tmp_path, mask_mod, **ISOLATED))
    assert finding.id == "mask.future"
    assert finding.evidence["future"] == finding.evidence["leaked"] == 15 + 10 + 28 + 1


def test_keys_outside_of_a_window_that_the_layer_does_not_declare_are_lost(tmp_path: Path) -> None:
    usual = isolated()

    def near(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return usual(layer, h, q, kv) & (q - kv < 4)

    (finding,) = of_masks(run_own(tmp_path, only_in(0, near, usual), **ISOLATED))
    assert (finding.id, finding.layer) == ("mask.lost", 0)
    assert "cut to the newest 4 keys" in finding.sentence


def test_the_mask_of_the_previous_prompt_is_recognised(tmp_path: Path) -> None:
    stale = isolated()
    second = [(1, 4, "a"), (4, 15, "b"), (15, 20, "c"), (20, 22, "cue")]
    spec = MaskSpec("second", (0, 1, 4, 15, 20), (0, 0, 0, 0, 0), (0, 1, 4, 15, 0))
    with own_attention(stale) as name:
        model = model_on(name)
        right = planted(tmp_path, model, lambda: model(prompt_ids()), **ISOLATED)
        found = planted(
            tmp_path, model, lambda: model(prompt_ids()), name="second", segments=second, mask=spec
        )
    assert of_masks(right) == []
    (finding,) = of_masks(found)
    assert finding.id == "mask.leak"
    assert finding.evidence["leaked"] > 0
    assert finding.evidence["lost"] > 0


def test_a_mask_shifted_by_two_is_one_finding_that_says_so(tmp_path: Path) -> None:
    moved = isolated(((0, 3), (3, 9), (9, 14), (14, 22)), reader=22)
    (finding,) = of_masks(run_own(tmp_path, moved, n=1, **ISOLATED))
    assert finding.id == "mask.leak"
    assert "the executed mask is the declared one shifted by +2" in finding.sentence


def test_a_custom_mask_that_ignores_padding_is_found(tmp_path: Path) -> None:
    prompt = torch.tensor([[0] * 3 + list(ids(6, 1)), list(ids(9, 2))])
    mask = (prompt != 0).long()
    with own_attention(causal) as name:
        model = model_on(name, "qwen3")
        found = planted(tmp_path, model, lambda: generated(model, prompt, attention_mask=mask))
    finding = one(found, "mask.padding")
    assert finding.severity is Severity.ERROR
    assert "6 rows see padding keys (18 pairs)" in finding.sentence
    assert "position 3" in finding.sentence


def test_sdpa_without_a_mask_and_without_is_causal_has_no_mask(tmp_path: Path) -> None:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=kw["scaling"])
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name, "phi3")
        found = planted(tmp_path, model, lambda: generated(model, prompt_ids()))
    finding = one(found, "mask.none")
    assert finding.layers == (0, 1, 2)
    assert "SDPA without a mask (attention 'mine' has no mask function)" in finding.sentence
    assert "rows 0-20 see the future" in finding.sentence


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_flex_attention_without_a_mask_is_found_at_every_level(tmp_path: Path, level: str) -> None:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        out = flex_attention(q, k, v, block_mask=mask, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        model = model_on(name, "mistral")
        found = planted(tmp_path, model, lambda: generated(model, prompt_ids()), level=level)
    assert one(found, "mask.none").layers == (0, 1, 2)


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_a_bool_mask_that_is_added_closes_nothing(tmp_path: Path, family: str) -> None:
    model = make_model(family, attn_implementation="eager")
    model.set_attn_implementation("eager")
    allowed = torch.ones(PROMPT, PROMPT).tril().bool()[None, None]
    found = planted(tmp_path, model, lambda: model(prompt_ids(), attention_mask=allowed))
    for finding in of(found, "mask.bool-added"):
        assert finding.severity is Severity.ERROR
        assert "closes nothing" in finding.sentence
    assert {f.id for f in of_masks(found)} == {"mask.bool-added"}


def test_a_layer_with_another_mask_is_named_without_a_declared_mask(tmp_path: Path) -> None:
    found = run_own(tmp_path, only_in(1, isolated(), causal))
    finding = one(found, "mask.layers-differ")
    assert (finding.severity, finding.layer) == (Severity.WARNING, 1)
    assert "Layer 1 ran" in finding.sentence
    assert "layers 0, 2 ran" in finding.sentence


@pytest.mark.parametrize(
    ("windows", "severity"),
    [((3, 6, 12), Severity.NOTE), ((6, 6, 40), Severity.WARNING)],
    ids=["a scheme", "one layer lost its window"],
)
def test_layers_with_windows_of_their_own_are_a_scheme(
    tmp_path: Path, windows: tuple[int, ...], severity: Severity
) -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    for layer, window in zip(model.model.layers, windows, strict=True):

        def forward(*args: Any, own: Any = layer.self_attn.forward, n: int = window, **kw: Any):
            rows = torch.arange(PROMPT)
            back = rows[:, None] - rows
            closed = torch.finfo(torch.float32).min
            mask = torch.zeros(PROMPT, PROMPT).masked_fill((back < 0) | (back >= n), closed)
            return own(*args, **{**kw, "attention_mask": mask[None, None]})

        layer.self_attn.forward = forward
    found = of(planted(tmp_path, model, lambda: model(prompt_ids())), "mask.layers-differ")
    assert {one.severity for one in found} == {severity}


def test_a_plain_model_does_not_isolate_declared_segments(tmp_path: Path) -> None:
    model = make_model("gpt_neox")
    found = planted(tmp_path, model, lambda: generated(model, prompt_ids()), **ISOLATED)
    (finding,) = of_masks(found)
    assert (finding.id, finding.severity) == ("mask.not-applied", Severity.ERROR)
    assert "causal SDPA without a mask" in finding.sentence
    assert "48 of them let third see first" in finding.sentence


def test_declared_segments_without_a_mask_give_a_warning_that_says_so(tmp_path: Path) -> None:
    model = make_model("llama")
    found = planted(tmp_path, model, lambda: generated(model, prompt_ids()), segments=SEGMENTS)
    (finding,) = of_masks(found)
    assert (finding.id, finding.severity) == ("mask.not-applied", Severity.WARNING)
    assert "no mask was declared; 3 segments are assumed to be isolated" in finding.sentence


def test_layers_of_two_kinds_with_the_same_fault_are_one_finding(tmp_path: Path) -> None:
    model = make_model("gemma2", sliding_window=9)
    found = planted(tmp_path, model, lambda: generated(model, prompt_ids()), **ISOLATED)
    (finding,) = of_masks(found)
    assert (finding.id, finding.layers) == ("mask.not-applied", (0, 1, 2))
    assert "up to 137 pairs that it closes are open" in finding.sentence


# -- correct runs ---------------------------------------------------------------------------------


def test_a_mask_as_declared_has_no_finding_at_any_level(tmp_path: Path) -> None:
    for level in ("basic", "advanced", "extreme"):
        found = run_own(tmp_path, isolated(), name=level, level=level, **ISOLATED)
        assert of_masks(found) == []


def test_isolated_segments_have_no_finding_without_a_declared_mask(tmp_path: Path) -> None:
    assert of_masks(run_own(tmp_path, isolated(), segments=SEGMENTS)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generation_has_no_finding_in_any_family(tmp_path: Path, family: str) -> None:
    model, declared = make_model(family), {"mask": "causal", "segments": SEGMENTS}
    found = planted(tmp_path, model, lambda: generated(model, prompt_ids(30), 12), **declared)
    assert serious(found) == []
    assert of_masks(found) == []


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_has_no_finding(tmp_path: Path, family: str, backend: str) -> None:
    model = make_model(family)
    model.set_attn_implementation("eager" if family == "gemma2" else backend)
    prompt = torch.tensor([[0] * 6 + list(ids(9, 1)), list(ids(15, 2))])
    mask = (prompt != 0).long()
    for declared in ({}, {"mask": "causal"}):
        found = planted(
            tmp_path,
            model,
            lambda: generated(model, prompt, 8, attention_mask=mask),
            name=f"run{len(declared)}",
            **declared,
        )
        assert of_masks(found) == []


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_static_cache_has_no_finding(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    found = planted(
        tmp_path,
        model,
        lambda: generated(
            model, prompt_ids(14), 10, cache_implementation="static", disable_compile=True
        ),
        mask="causal",
    )
    assert of_masks(found) == []


def test_beam_search_and_assisted_generation_have_no_finding(tmp_path: Path) -> None:
    model, small = make_model("llama"), make_model("llama", num_hidden_layers=1)
    for name, options in (("beams", {"num_beams": 3}), ("helped", {"assistant_model": small})):
        found = planted(
            tmp_path,
            model,
            lambda o=options: generated(model, prompt_ids(), 8, **o),
            name=name,
            mask="causal",
        )
        assert of_masks(found) == []


def test_a_loop_without_a_cache_has_no_finding(tmp_path: Path) -> None:
    with own_attention(isolated()) as name:
        model = model_on(name)

        def run() -> None:
            tokens = prompt_ids()
            for _ in range(3):
                best = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
                tokens = torch.cat((tokens, best), 1)

        assert of_masks(planted(tmp_path, model, run, **ISOLATED)) == []


def test_a_bidirectional_encoder_has_no_finding(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=300, num_hidden_layers=2, **sizes)
    for backend in ("sdpa", "eager"):
        model = BertForMaskedLM(config).eval()
        model.set_attn_implementation(backend)
        found = planted(tmp_path, model, lambda m=model: m(prompt_ids()), name=backend)
        assert of_masks(found) == []


def test_a_bidirectional_prefix_is_a_note(tmp_path: Path) -> None:
    def mask_mod(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) | ((kv < 9) & (q < 9))

    found = run_own(tmp_path, mask_mod)
    assert one(found, "mask.future").severity is Severity.NOTE
    assert serious(found) == []


def test_layers_with_sliding_windows_have_no_finding(tmp_path: Path) -> None:
    model = make_model("gemma2", sliding_window=5)
    assert of_masks(planted(tmp_path, model, lambda: generated(model, prompt_ids(30), 6))) == []


def test_bfloat16_has_no_finding(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        model = make_model(family).to(torch.bfloat16)
        found = planted(tmp_path, model, lambda m=model: generated(m, prompt_ids()), name=family)
        assert of_masks(found) == []
