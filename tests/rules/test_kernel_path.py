"""The path rule names layer, step and exception of what ran instead of FlexAttention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from support.cases import found_in_case
from support.patches import Own, causal_from, isolating
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import BuildRecord, CallRecord, GenerationRecord, StepRecord
from flexinspect.rules.attention.kernel_path import KernelPathRule
from flexinspect.rules.context import RuleContext

PROMPT = 15
SPANS = [(1, 7), (9, 15)]
SEGMENTS = [(1, 7, "question 1"), (9, 15, "question 2")]
ISOLATED = {"segments": SEGMENTS, "mask": "segment-isolation"}


def prompt(n: int = PROMPT) -> torch.Tensor:
    return torch.tensor([ids(n, 1)])


def generate(model: Any, new: int = 6, **options: Any) -> Any:
    input_ids = options.pop("input_ids", prompt())
    return lambda: model.generate(input_ids, max_new_tokens=new, do_sample=False, **options)


def paths(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.id.startswith("path.")]


# -- faults ----------------------------------------------------------------------------------------


def test_an_exception_in_one_layer_from_the_third_decode_step_on(tmp_path: Path) -> None:
    model = make_model("qwen2")
    Own(model, lambda layer, rows, keys: "caught" if layer == 2 and keys > 17 else "flex")
    fallback = one(planted(tmp_path, model, generate(model)), "path.fallback")
    assert (fallback.step, fallback.layer, fallback.layers) == (3, 2, ())
    assert fallback.sentence == (
        "Layer 2 (of 3 layers) fell back to sdpa in step 3: RuntimeError: expected all tensors on "
        "one device, layer 2, suppressed."
    )
    assert (fallback.times, fallback.last_step) == (3, 5)
    assert fallback.severity is Severity.WARNING  # the decode row is open either way


def test_a_fallback_that_loses_the_mask_is_an_error_and_counts_the_pairs(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda layer, *_: "caught" if layer == 1 else "flex", mask_mod=isolating(SPANS))
    found = planted(tmp_path, model, lambda: model(prompt(), use_cache=False), **ISOLATED)
    fallback = one(found, "path.fallback")
    assert fallback.severity is Severity.ERROR
    assert fallback.evidence["leaked"] == 36
    assert "; 36 pairs are open that are closed in the other layers" in fallback.sentence


def test_every_layer_falls_back_and_nothing_is_left_to_compare_with(tmp_path: Path) -> None:
    model = make_model("mistral", sliding_window=None)
    Own(model, lambda *_: "caught", mask_mod=isolating(SPANS))
    found = planted(tmp_path, model, generate(model, 3), **ISOLATED)
    fallback = one(found, "path.fallback")
    assert (fallback.layers, fallback.times) == ((0, 1, 2), 3)
    assert fallback.severity is Severity.ERROR
    assert fallback.sentence.startswith("All 3 layers fell back to sdpa in step 0: RuntimeError")
    assert "closed in the declared mask" in fallback.sentence


def test_the_kernel_that_raised_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda *_: "caught kernel")
    found = planted(tmp_path, model, generate(model, 4))
    fallback = one(found, "path.fallback")
    assert fallback.layers == (0, 1, 2)
    assert "flex_attention raised ValueError: block_mask was created for" in fallback.sentence
    assert fallback.times == 4
    assert of(found, "path.kernel-failed") == []  # it was made up for: one cause, one finding


def test_a_handler_that_runs_flex_without_the_mask(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda layer, *_: "unmasked" if layer == 2 else "flex")
    found = planted(tmp_path, model, lambda: model(prompt()))
    swallowed = one(found, "path.swallowed")
    assert (swallowed.layer, swallowed.severity) == (2, Severity.ERROR)
    assert swallowed.evidence["leaked"] == PROMPT * (PROMPT - 1) // 2


def test_decode_steps_that_bypass_flex_in_all_layers(tmp_path: Path) -> None:
    model = make_model("phi3")
    Own(model, lambda layer, rows, keys: "flex" if rows > 1 else "sdpa")
    bypass = one(planted(tmp_path, model, generate(model, 5)), "path.bypass")
    assert (bypass.step, bypass.layers) == (1, (0, 1, 2))
    assert bypass.sentence == (
        "All 3 layers ran flex uncompiled for the prompt and sdpa for the steps of one row, from "
        "step 1 on: the patch calls the original attention there, without an exception."
    )
    assert (bypass.times, bypass.last_step) == (4, 4)
    assert bypass.severity is Severity.WARNING


def test_a_bypass_that_the_declared_mask_allows_is_a_note(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda layer, rows, keys: "flex" if rows > 1 else "sdpa", mask_mod=isolating(SPANS))
    found = planted(tmp_path, model, generate(model, 3), mask="causal")
    assert one(found, "path.bypass").severity is Severity.NOTE


def test_a_bypass_in_one_layer_alone(tmp_path: Path) -> None:
    model = make_model("gpt_neox")
    Own(model, lambda layer, rows, keys: "sdpa" if rows == 1 and layer == 0 else "flex")
    bypass = one(planted(tmp_path, model, generate(model, 4)), "path.bypass")
    assert (bypass.step, bypass.layer, bypass.layers) == (1, 0, ())


def test_a_layer_that_leaves_flex_late_and_without_an_exception(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda layer, rows, keys: "sdpa" if layer == 1 and keys >= 18 else "flex")
    fallback = one(planted(tmp_path, model, generate(model)), "path.fallback")
    assert (fallback.step, fallback.layer) == (3, 1)
    assert fallback.sentence == (
        "From step 3 on layer 1 ran sdpa after flex uncompiled, without an exception."
    )


def test_a_layer_that_was_never_patched(tmp_path: Path) -> None:
    model = make_model("qwen3")
    Own(model, lambda layer, *_: "sdpa" if layer == 1 else "flex", mask_mod=isolating(SPANS))
    unpatched = one(planted(tmp_path, model, generate(model, 4)), "path.unpatched-layer")
    assert (unpatched.step, unpatched.layer, unpatched.times) == (0, 1, 4)
    assert unpatched.severity is Severity.ERROR
    assert unpatched.sentence == (
        "Layer 1 (of 3 layers) ran sdpa in step 0, while layers 0, 2 ran flex uncompiled, without "
        "an exception: it was never patched; 36 pairs are open that are closed in the other layers."
    )


def test_a_step_that_swaps_in_the_plain_model_in_a_loop_without_cache(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda layer, rows, keys: "sdpa" if rows == PROMPT + 2 else "flex")

    def loop() -> None:
        input_ids = prompt()
        for _ in range(4):
            token = model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)

    fallback = one(planted(tmp_path, model, loop), "path.fallback")
    assert (fallback.step, fallback.layers, fallback.times) == (2, (0, 1, 2), 1)


def test_a_padding_mask_that_the_layer_receives_but_the_kernel_does_not(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model)
    ones = torch.ones(1, 1, PROMPT, PROMPT, dtype=torch.bool).tril()
    found = planted(tmp_path, model, lambda: model(prompt(), attention_mask=ones))
    ignored = one(found, "path.mask-ignored")
    assert ignored.severity is Severity.NOTE
    assert ignored.layers == (0, 1, 2)
    assert "received a mask (bool (1, 1, 15, 15)) in step 0" in ignored.sentence


def test_a_call_that_raises_and_ends_the_forward(tmp_path: Path) -> None:
    model = make_model("llama")
    own = Own(model)
    own.masks[1, 17] = 3  # no mask at all: the kernel raises

    def run() -> None:
        cache = model(prompt()).past_key_values
        token = torch.tensor([[5]])
        model(token, past_key_values=cache)
        Own.__call__, kept = _bare, Own.__call__
        try:
            model(token, past_key_values=cache)
        except Exception:
            pass
        finally:
            Own.__call__ = kept

    failed = one(planted(tmp_path, model, run), "path.kernel-failed")
    assert (failed.step, failed.layer, failed.severity) == (2, 0, Severity.ERROR)
    assert failed.sentence.startswith("The forward of step 2 ended in layer 0: flex_attention")
    assert "(1 row, 17 keys)" in failed.sentence


def _bare(self: Any, module: Any, query: Any, key: Any, value: Any, *_: Any, **kw: Any) -> Any:
    return flex_module.flex_attention(query, key, value[..., :-1, :], enable_gqa=True), None


def test_the_same_mask_in_each_layer_for_heads_that_share_it(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, heads=4).share = False
    built = one(planted(tmp_path, model, generate(model, 3)), "path.needless-builds")
    assert (built.layers, built.times, built.severity) == ((0, 1, 2), 3, Severity.NOTE)
    assert built.evidence["builds"] == 3
    assert "(grid 1 x 4 x 15 x 15, " in built.sentence
    assert ", for 4 heads that all share it." in built.sentence


def needless(n: int, layers: int, ms: float) -> Finding:
    """Return the finding of one step, of which each layer builds the mask of n x n cells."""
    calls = [
        CallRecord(layer, "flex", "own", "f" * 16, 1, 2, 2, n, n, 8, "torch.float32", 1.0)
        for layer in range(layers)
    ]
    builds = [BuildRecord(layer, None, None, n, n, "own.rule", ms, 0) for layer in range(layers)]
    step = StepRecord(
        *(0, 0, "prefill", n, 0, n, 0.0, 100.0, 0.1), calls=tuple(calls), builds=tuple(builds)
    )
    context, rule = RuleContext(), KernelPathRule()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()))
    rule.on_generation_start(context)
    context.add_step(step)
    return one(list(rule.on_step(step)), "path.needless-builds")


@pytest.mark.parametrize("ms", [0.1, 90.0])
def test_needless_builds_are_as_severe_on_a_busy_machine_as_on_an_idle_one(ms: float) -> None:
    costly, short, few = needless(2048, 4, ms), needless(512, 16, ms), needless(4096, 3, ms)
    assert costly.severity is Severity.WARNING
    assert costly.evidence["needless_cells"] == 3 * 2048 * 2048
    assert {short.severity, few.severity} == {Severity.NOTE}


def test_an_unchanged_mask_that_is_built_for_each_sequence(tmp_path: Path) -> None:
    model = make_model("llama")
    own = Own(model)

    def loop(fresh: bool) -> Any:
        def run() -> None:
            for _ in range(5):
                if fresh:
                    own.masks.clear()
                model(prompt(), use_cache=False)

        return run

    built = one(planted(tmp_path, model, loop(True)), "path.needless-builds")
    assert (built.generation, built.step, built.severity) == (2, 0, Severity.NOTE)
    assert built.sentence.startswith("The mask of step 0 is the same as in the 2 steps before")
    assert paths(planted(tmp_path, model, loop(False), name="kept")) == []


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_plain_model_of_every_family_is_silent(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    padded = torch.cat([prompt(), prompt()])
    padded[0, :4] = 0
    mask = (padded != 0).long()
    found = planted(tmp_path, model, generate(model, 4, input_ids=padded, attention_mask=mask))
    assert paths(found) == []


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_flex_in_every_layer_and_step_is_silent(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    Own(model, mask_mod=causal_from)
    assert paths(planted(tmp_path, model, generate(model, 6))) == []


def test_a_mask_that_is_looked_up_and_made_on_a_key_error_is_no_fallback(tmp_path: Path) -> None:
    model = make_model("llama")
    Own(model, lambda *_: "looked up")
    found = planted(tmp_path, model, generate(model, 3))
    assert serious(paths(found)) == []
    assert one(found, "path.swallowed").severity is Severity.NOTE


def test_masks_that_differ_by_layer_are_not_built_in_vain(tmp_path: Path) -> None:
    model = make_model("llama")
    layer_now = [0]

    def choose(layer: int, rows: int, keys: int) -> str:
        layer_now[0] = layer
        return "flex"

    def mask_mod(offset: int) -> Any:
        window = 4 + layer_now[0]
        return lambda b, h, q, k: (k <= q + offset) & (k > q + offset - window)

    Own(model, choose, mask_mod=mask_mod).share = False
    assert paths(planted(tmp_path, model, generate(model, 3))) == []


def test_two_runs_on_two_backends_are_two_generations(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        generate(model, 3)()
        Own(model)
        generate(model, 3)()
        model.set_attn_implementation("eager")
        generate(model, 3)()

    assert paths(planted(tmp_path, model, run)) == []


def test_beams_sampling_and_a_static_cache_are_silent(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        model.generate(prompt(), max_new_tokens=3, num_beams=2)
        model.generate(prompt(), max_new_tokens=3, do_sample=True)
        model.generate(prompt(), max_new_tokens=3, cache_implementation="static")

    assert serious(planted(tmp_path, model, run)) == []


# -- the cases -------------------------------------------------------------------------------------


def test_the_silent_fallback_of_one_layer() -> None:
    found = of(found_in_case("a02_silent_fallback"), "path.fallback")
    assert [(f.generation, f.step, f.layer, f.severity) for f in found] == [
        (2, 0, 1, Severity.ERROR),
        (3, 0, 1, Severity.ERROR),
    ]
    for finding in found:
        assert "Layer 1 (of 2 layers) fell back to sdpa in step 0: RuntimeError" in finding.sentence


def test_the_mask_that_is_one_short_ends_the_forward_in_layer_0() -> None:
    failed = of(found_in_case("k04_mask_one_short"), "path.kernel-failed")
    (inner,) = (finding for finding in failed if finding.layer is not None)
    assert (inner.step, inner.layer, inner.severity) == (1, 0, Severity.NOTE)
    assert "flex_attention (1 row, 33 keys, mask made for 1 x 32) raised" in inner.sentence


def test_the_mask_of_each_layer_and_head_at_each_step() -> None:
    built = one(found_in_case("k09_no_cache"), "path.needless-builds")
    assert (built.step, built.layers, built.times) == (0, (0, 1, 2, 3), 5)
    assert built.evidence["builds"] == 4
    assert "grid 1 x 4 x 10 x 10" in built.sentence


@pytest.mark.parametrize("name", ["c1_plain_causal_prompt", "c4_two_graphs", "c6_shared_mask"])
def test_controls_yield_no_error_and_no_warning(name: str) -> None:
    assert serious(found_in_case(name)) == []
