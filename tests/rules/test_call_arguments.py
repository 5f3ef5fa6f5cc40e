"""Calls with another scale, softcap or dtype than the others, and correct programs without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted
from support.tiny import ids, make_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, GenerationRecord, StepRecord
from flexinspect.rules.attention.attention_shape import CallFactsRule
from flexinspect.rules.context import RuleContext

INPUT_IDS = torch.tensor([ids(14, 3)])
ALL = ("attention.scale", "attention.softcap-differs", "attention.dtype-differs")


def run(tmp_path: Path, model: Any, n: int = 5) -> list[Finding]:
    options = {
        "attention_mask": torch.ones_like(INPUT_IDS),
        "max_new_tokens": n,
        "do_sample": False,
    }
    found = planted(tmp_path, model, lambda: model.generate(INPUT_IDS, **options))
    return [finding for finding in found if finding.id in ALL]


@pytest.mark.parametrize(("family", "layer"), [("llama", 1), ("qwen3", 2), ("gemma2", 0)])
def test_one_layer_with_a_scale_of_its_own_is_named(
    family: str, layer: int, tmp_path: Path
) -> None:
    model = make_model(family)
    model.model.layers[layer].self_attn.scaling *= 2
    (finding,) = run(tmp_path, model)
    assert (finding.id, finding.severity) == ("attention.scale", Severity.WARNING)
    assert (finding.layer, finding.step, finding.times) == (layer, 0, 1)
    width = 12 if family == "llama" else 16
    usual = width**-0.5
    assert finding.sentence == (
        f"In layer {layer} scores are scaled by {2 * usual:.4g} (2 times 1/sqrt({width})) in step "
        f"0, in the 2 others {usual:.4g} (1 times 1/sqrt({width}))."
    )


def test_a_scale_that_changes_with_the_phase_is_named(tmp_path: Path) -> None:
    model = make_model("llama")

    def scaled(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kw: Any) -> Any:
        if q.shape[2] == 1:
            scaling = 1.0
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **kw)

    AttentionInterface.register("phase_scaled", scaled)
    AttentionMaskInterface.register("phase_scaled", sdpa_mask)
    model.set_attn_implementation("phase_scaled")
    (finding,) = run(tmp_path, model)
    assert (finding.id, finding.step, finding.layers) == ("attention.scale", 1, (0, 1, 2))
    assert "In all 3 layers scores are scaled by 1 (" in finding.sentence
    assert "from step 1 (decode) on" in finding.sentence


def test_a_cap_that_one_layer_lost_is_named(tmp_path: Path) -> None:
    model = make_model("gemma2")
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    (finding,) = run(tmp_path, model)
    assert (finding.id, finding.layer) == ("attention.softcap-differs", 1)
    assert finding.sentence == (
        "In layer 1 scores are not capped in step 0, in the 2 others capped at 50."
    )


def narrow(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kw: Any) -> Any:
    """Compute attention of layer 2 in bfloat16, and of the others as it comes."""
    own = torch.bfloat16 if module.layer_idx == 2 else q.dtype
    cast = [t.to(own) for t in (q, k, v)]
    out, weights = sdpa_attention_forward(module, *cast, mask, scaling=scaling, **kw)
    return out.to(q.dtype), weights


def test_one_layer_in_another_dtype_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    AttentionInterface.register("narrow", narrow)
    AttentionMaskInterface.register("narrow", sdpa_mask)
    model.set_attn_implementation("narrow")
    finding = one(run(tmp_path, model), "attention.dtype-differs")
    assert (finding.layer, finding.evidence["odd"]) == (2, "bfloat16")
    assert "In layer 2 attention runs in bfloat16 in step 0, in the 2 others float32." in (
        finding.sentence
    )


# -- correct runs ----------------------------------------------------------------------------------


def test_a_model_whose_scale_differs_in_every_layer_is_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scaling /= number + 1
    assert run(tmp_path, model) == []


def calls(*changed: dict[str, Any]) -> tuple[CallRecord, ...]:
    usual: dict[str, Any] = {"scale": 0.5, "softcap": None, "head_dim": 4, "mask": "m"}
    return tuple(
        CallRecord(
            *(layer, "sdpa", "b", facts["mask"], 1, 4, 2, 1, 9, facts["head_dim"], "float32"),
            facts["scale"],
            softcap=facts["softcap"],
        )
        for layer, facts in enumerate({**usual, **one} for one in changed)
    )


def look(*each: Sequence[CallRecord]) -> list[Finding]:
    context, rule = RuleContext(), CallFactsRule()
    context.start_generation(GenerationRecord(0, "s", "m", "contiguous", (), ()))
    rule.on_generation_start(context)
    made = (
        StepRecord(0, n, "decode", 1, 8, 9, 0.0, 1.0, 0.1, calls=tuple(one))
        for n, one in enumerate(each)
    )
    return [finding for record in made for finding in rule.on_step(record)]


def test_layers_that_take_turns_are_kinds_of_their_own() -> None:
    local, whole = {"mask": "window"}, {"mask": "all", "scale": 0.25}
    assert look(calls(*[local] * 3, whole, *[local] * 3, whole)) == []
    wide = {"head_dim": 16, "scale": 0.5}
    assert look(calls({}, {}, {}, wide)) == []
    assert look(calls({"scale": 1.0}, {"scale": 1.0}, {"scale": 1.0, "head_dim": 16})) == []


def test_half_of_the_layers_are_no_odd_ones() -> None:
    assert look(calls({}, {"softcap": 30.0}, {}, {"softcap": 30.0})) == []


def test_one_of_two_layers_that_differ_is_odd() -> None:
    (finding,) = look(calls({}, {"scale": 1.0}))
    assert (finding.id, finding.layer) == ("attention.scale", 1)


def test_the_default_scale_and_the_same_number_are_the_same() -> None:
    assert look(calls({"scale": None}, {"scale": 0.5}, {"scale": None})) == []


def test_a_difference_from_the_first_step_on_is_reported_once() -> None:
    odd = calls({}, {"scale": 1.0}, {})
    assert of(look(odd, odd, odd), "attention.scale") == look(odd)
    back = look(odd, calls({}, {}, {}))
    assert [finding.step for finding in back] == [0, 1]
    assert "from step 1 (decode) on, in the step before 1 (2 times 1/sqrt(4))" in back[1].sentence
