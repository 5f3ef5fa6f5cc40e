"""Layer outputs out of range: planted in real tiny models; correct models have no findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor

from flexinspect.records.finding import Finding, Severity

SATURATION = "numbers.saturation"
INPUT_IDS = torch.tensor([ids(14, 3)])
Change = Callable[[int, Tensor, Tensor], Tensor]
"""(number of the call from 0, the layer's input, its output) to the output that is given on."""


def run_changed(
    tmp_path: Path,
    layer: int,
    change: Change,
    *,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    n: int = 10,
) -> list[Finding]:
    """Generate with a layer whose output is changed, and return what was found."""
    model = make_model(family).to(dtype)
    calls: list[int] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        whole = output if isinstance(output, Tensor) else output[0]
        changed = change(len(calls), args[0], whole.clone())
        calls.append(1)
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    layers = model.gpt_neox.layers if family == "gpt_neox" else model.model.layers
    handle = layers[layer].register_forward_hook(hook)
    options = {
        "attention_mask": torch.ones_like(INPUT_IDS),
        "max_new_tokens": n,
        "do_sample": False,
    }
    found = planted(tmp_path, model, lambda: model.generate(INPUT_IDS, **options))
    handle.remove()
    return found


# -- jumps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "layer"), [("llama", 1), ("gpt_neox", 2), ("qwen3", 0)])
def test_a_layer_that_grows_by_orders_at_a_step_is_named(
    family: str, layer: int, tmp_path: Path
) -> None:
    found = run_changed(
        tmp_path, layer, lambda n, x, out: out * 1e4 if n == 6 else out, family=family
    )
    finding = one(found, "numbers.jump")
    assert (finding.severity, finding.step, finding.layer) == (Severity.WARNING, 6, layer)
    assert finding.evidence["times"] > 1e3
    assert f"The output of layer {layer} is " in finding.sentence
    assert "times larger in step 6 than in any decode step before" in finding.sentence
    assert ("the layers before it are unchanged" in finding.sentence) == (layer > 0)


def test_a_layer_that_fades_is_named_once_for_all_steps(tmp_path: Path) -> None:
    found = run_changed(tmp_path, 2, lambda n, x, out: out / 3e3 if n >= 5 else out)
    finding = one(found, "numbers.jump")
    assert (finding.step, finding.layer, finding.times) == (5, 2, 5)
    assert "times smaller in step 5" in finding.sentence


def test_a_huge_single_channel_is_what_models_do(tmp_path: Path) -> None:
    def massive(n: int, x: Tensor, out: Tensor) -> Tensor:
        if n == 5:
            out[..., 7] += out.norm() * 800
        return out

    assert serious(run_changed(tmp_path, 1, massive)) == []


def test_a_bit_flipped_in_an_exponent_is_not(tmp_path: Path) -> None:
    def flipped(n: int, x: Tensor, out: Tensor) -> Tensor:
        if n == 7:
            out[..., 7] = 1e20
        return out

    assert one(run_changed(tmp_path, 0, flipped), "numbers.jump").step == 7


def test_massive_activations_of_the_first_row_are_in_the_prefill_alone(tmp_path: Path) -> None:
    def massive(n: int, x: Tensor, out: Tensor) -> Tensor:
        if n == 0:
            out[:, 0, 3] += 5e3
        return out

    assert serious(run_changed(tmp_path, 1, massive)) == []


# -- saturation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_layer_whose_output_is_constant_is_dead(value: float, tmp_path: Path) -> None:
    found = run_changed(tmp_path, 1, lambda n, x, out: torch.full_like(out, value))
    finding = of(found, SATURATION)[0]
    assert (finding.severity, finding.step, finding.layer) == (Severity.WARNING, 0, 1)
    assert f"Every value in the output of layer 1 is {value:g} in all 14 rows" in finding.sentence
    assert finding.times == 10


def test_a_layer_that_gives_back_its_input_adds_nothing(tmp_path: Path) -> None:
    finding = one(run_changed(tmp_path, 2, lambda n, x, out: x), SATURATION)
    assert (finding.step, finding.layer, finding.times) == (0, 2, 10)
    assert finding.sentence.startswith("Layer 2 returns its input unchanged in step 0")


def test_a_layer_whose_weights_are_zero_adds_nothing(tmp_path: Path) -> None:
    model = make_model("mistral")
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    finding = one(planted(tmp_path, model, lambda: model(INPUT_IDS)), SATURATION)
    assert (finding.layer, finding.evidence["layers"]) == (1, [1])


def test_a_layer_that_hands_out_an_old_buffer_is_stuck(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def stuck(n: int, x: Tensor, out: Tensor) -> Tensor:
        if n == 2:
            kept.append(out)
        return kept[0] if kept else out

    finding = of(run_changed(tmp_path, 1, stuck), SATURATION)[0]
    assert finding.layer == 1
    assert (finding.severity, finding.step) == (Severity.WARNING, 3)
    assert (
        "in step 3 is the same as in step 2, although the input token differs" in finding.sentence
    )


def test_the_same_token_again_and_again_makes_no_layer_stuck(tmp_path: Path) -> None:
    assert serious(run_changed(tmp_path, 0, lambda n, x, out: out, family="gemma2", n=30)) == []


def test_scores_at_their_cap_are_saturated(tmp_path: Path) -> None:
    model = make_model("gemma2")
    model.model.layers[1].self_attn.q_proj.weight.data *= 1e3
    options = {
        "attention_mask": torch.ones_like(INPUT_IDS),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    finding = one(
        planted(tmp_path, model, lambda: model.generate(INPUT_IDS, **options)), SATURATION
    )
    assert (finding.layer, finding.evidence["softcap"]) == (1, 50.0)
    assert "have scores at the softcap of 50 in every head of layer 1" in finding.sentence


# -- the end of float16 ----------------------------------------------------------------------------


def large(value: float) -> Change:
    def change(n: int, x: Tensor, out: Tensor) -> Tensor:
        out[:, :, 3] = value
        return out

    return change


@pytest.mark.parametrize(("value", "severity"), [(40_000, "note"), (64_000, "warning")])
def test_an_output_near_the_limit_of_float16_is_reported(
    value: float, severity: str, tmp_path: Path
) -> None:
    found = run_changed(tmp_path, 1, large(value), dtype=torch.float16, n=3)
    finding = one(found, "numbers.overflow-risk")
    assert (finding.severity, finding.layer, finding.step) == (severity, 1, 0)
    assert f"The output of layer {finding.layer} reaches {value:.0f} in step 0" in finding.sentence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_other_dtypes_there_is_no_end_near(dtype: torch.dtype, tmp_path: Path) -> None:
    found = run_changed(tmp_path, 1, large(64_000), dtype=dtype, n=3)
    assert of(found, "numbers.overflow-risk") == []


def test_large_numbers_that_no_float16_can_be_are_not_float16(tmp_path: Path) -> None:
    """As under autocast, where the residual stream stays float32."""
    found = run_changed(tmp_path, 1, large(40_000), dtype=torch.float16, n=2)
    assert of(found, "numbers.overflow-risk") != []
    model = make_model("llama").half()
    wide = model.model.layers[1].register_forward_hook(
        lambda module, args, out: large(40_001)(0, out, out.float())
    )
    narrow = model.model.layers[2].register_forward_pre_hook(
        lambda module, args: (args[0].half().clamp(-100, 100), *args[1:])
    )
    found = planted(tmp_path, model, lambda: model(INPUT_IDS), name="autocast")
    wide.remove()
    narrow.remove()
    assert of(found, "numbers.overflow-risk") == []
