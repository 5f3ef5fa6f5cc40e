"""Degenerate attention: collapsed to one key or to BOS, uniform, or infinite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model

from flexinspect.masks.mask_presets import causal
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import PromptTokenIds, compose_prompt
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.rules.attention.attention_shape import AttentionShapeRule
from flexinspect.rules.context import RuleContext

INPUT_IDS = torch.tensor([(1, *ids(13, 3))])
SEGMENTS = [(0, 1, "bos"), (1, 14, "paraphrase 1")]


def run(tmp_path: Path, model: Any, n: int = 8, **options: Any) -> list[Finding]:
    given = {"attention_mask": torch.ones_like(INPUT_IDS), "max_new_tokens": n, "do_sample": False}
    return planted(
        tmp_path,
        model,
        lambda: model.generate(INPUT_IDS, **{**given, **options}),
        segments=SEGMENTS,
    )


def scaled(model: Any, name: str, factor: float, layers: Sequence[int] = (0, 1, 2)) -> Any:
    for layer in layers:
        getattr(model.model.layers[layer].self_attn, name).weight.data *= factor
    return model


# -- one key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "name"), [("llama", "q_proj"), ("mistral", "k_proj")])
def test_scores_that_are_far_too_large_collapse_every_head(
    family: str, name: str, tmp_path: Path
) -> None:
    finding = one(run(tmp_path, scaled(make_model(family), name, 1e4)), "attention.collapsed")
    assert (finding.severity, finding.layer) == (Severity.WARNING, None)
    assert finding.times >= 2
    assert "Every head of all 3 layers puts more than 0.999 of its attention" in finding.sentence
    assert "in 3 consecutive steps (up to step " in finding.sentence


def test_a_scale_that_was_left_out_in_wide_heads_collapses_too(tmp_path: Path) -> None:
    model = scaled(make_model("qwen2"), "q_proj", 50.0)
    for layer in model.model.layers:
        layer.self_attn.scaling = 50.0
    assert of(run(tmp_path, model), "attention.collapsed") != []


def test_one_sharp_layer_is_a_note(tmp_path: Path) -> None:
    found = run(tmp_path, scaled(make_model("llama"), "q_proj", 1e4, [1]), n=20)
    notes = of(found, "attention.collapsed")
    assert [(note.severity, note.layer) for note in notes] == [(Severity.NOTE, 1)]
    assert "Every head of layer 1 puts more than 0.999" in notes[0].sentence


# -- the same on all keys --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "layer"),
    [("llama", "q_proj", 1), ("mistral", "k_proj", 0), ("qwen2", "q_proj", 2)],
)
def test_queries_or_keys_that_are_zero_make_attention_uniform(
    family: str, name: str, layer: int, tmp_path: Path
) -> None:
    found = run(tmp_path, scaled(make_model(family), name, 0.0, [layer]))
    finding = one(found, "attention.uniform")
    assert (finding.severity, finding.layer, finding.step) == (Severity.WARNING, layer, 1)
    keys = 9 if family == "mistral" else 15
    assert finding.sentence == (
        f"Every head of layer {layer} gives each of the {keys} keys open to the newest row of step "
        f"1 the same weight (1/{keys}), for any input token: its scores do not depend on the "
        "keys."
    )
    assert serious(found) == [finding]


def test_a_scale_of_zero_makes_attention_uniform_in_bfloat16_as_well(tmp_path: Path) -> None:
    model = make_model("qwen3").to(torch.bfloat16)
    model.set_attn_implementation("eager")  # SDPA makes NaN of it: 0 times -Inf
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.0
    finding = one(run(tmp_path, model), "attention.uniform")
    assert finding.layers == (0, 1, 2)
    assert "Every head of all 3 layers" in finding.sentence


def test_keys_that_are_all_the_same_make_attention_uniform(tmp_path: Path) -> None:
    model = make_model("gpt_neox")
    hook = model.gpt_neox.layers[1].attention.query_key_value.register_forward_hook(same_keys)
    model.gpt_neox.rotary_emb.register_forward_hook(no_rotation)
    found = run(tmp_path, model)
    hook.remove()
    assert one(found, "attention.uniform").layer == 1


def same_keys(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    heads = out.unflatten(-1, (4, 3, -1)).clone()
    heads[..., 1, :] = 3.0
    return heads.flatten(-3)


def no_rotation(module: Any, args: Any, out: Any) -> Any:
    cos, sin = out
    return torch.ones_like(cos), torch.zeros_like(sin)


def test_repeated_padding_is_no_fault_of_the_layer(tmp_path: Path) -> None:
    """The embedding of padding is zero, and so are the first layer's queries."""
    model = make_model("llama")
    found = run(tmp_path, model, logits_processor=[lambda input_ids, scores: pad(scores)])
    assert of(found, "attention.uniform") == []


def pad(scores: torch.Tensor) -> torch.Tensor:
    only = torch.full_like(scores, -torch.inf)
    only[:, 0] = 0.0
    return only


# -- BOS, and what records alone can show ----------------------------------------------------------

PROMPT = compose_prompt(
    PromptTokenIds((1,), (2, 3), ((5, 6, 7), (8, 9)), (4,), (11,)), max_new_tokens=40
)
N = len(PROMPT.ids)
LAYERS, HEADS = 3, 2


def steps(
    number: int, change: Callable[[int, dict[str, Any]], None] = lambda n, arrays: None
) -> list[StepRecord]:
    """Return the prefill and decode steps of a correct model, their arrays changed."""
    made = []
    for n in range(number):
        before, rows = (0, N) if n == 0 else (N + n - 1, 1)
        after = before + rows
        cells = causal().dense(rows, after, q_offset=before)[None]
        mask = MaskRecord(f"f{n}", "block", 1, 1, rows, after, before, cells=cells)
        calls = tuple(
            CallRecord(i, "sdpa", "b", f"f{n}", 1, 2, 1, rows, after, 4, "float32", 0.5, 1e-6)
            for i in range(LAYERS)
        )
        arrays: dict[str, Any] = {
            "mass": np.full((LAYERS, HEADS, len(PROMPT.segments)), 0.1, np.float32),
            "lse": np.full((LAYERS, HEADS), 3.0, np.float32),
            "entropy": np.full((LAYERS, HEADS), 1.0, np.float32),
        }
        change(n, arrays)
        token = TokenRecord(after, 20 + n, "w", "w", after, 7, step=n)
        made.append(
            StepRecord(
                *(0, n, "prefill" if n == 0 else "decode", rows, before, after, 0.0, 1.0, 0.1),
                tokens=(token,),
                calls=calls,
                masks=(mask,),
                arrays=tuple(ArrayRecord(f"attention.{k}", v) for k, v in arrays.items()),
            )
        )
    return made


def look(records: Sequence[StepRecord]) -> list[Finding]:
    tokens = tuple(TokenRecord(i, t, "p", "p", i, 0) for i, t in enumerate(PROMPT.ids))
    context, rule = RuleContext(), AttentionShapeRule()
    context.start_generation(GenerationRecord(0, "s", "m", "contiguous", PROMPT.segments, tokens))
    rule.on_generation_start(context)
    found: list[Finding] = []
    for record in records:
        context.add_step(record)
        found += rule.on_step(record)
    return found


def test_a_correct_model_has_no_findings() -> None:
    assert look(steps(12)) == []


def test_all_attention_on_bos_is_a_note() -> None:
    def sink(n: int, arrays: dict[str, Any]) -> None:
        arrays["mass"][:], arrays["mass"][:, :, 0] = 0.0005, 0.995

    found = look(steps(6, sink))
    assert {(f.id, f.severity) for f in found} == {("attention.sink", Severity.NOTE)}
    assert found[0].step == 3
    assert (
        "gives BOS at least 0.995 of its attention in 3 consecutive generated rows"
        in found[0].sentence
    )


def test_one_head_that_looks_elsewhere_is_enough() -> None:
    def sink(n: int, arrays: dict[str, Any]) -> None:
        arrays["mass"][:], arrays["mass"][:, :, 0] = 0.0005, 0.995
        arrays["mass"][2, 1, 0] = 0.9

    assert look(steps(6, sink)) == []


def test_a_row_that_may_see_one_key_alone_cannot_collapse() -> None:
    def sharp(n: int, arrays: dict[str, Any]) -> None:
        arrays["entropy"][:] = 0.0

    one_key = steps(6, sharp)
    for record in one_key[1:]:
        cells = record.masks[0].cells
        assert cells is not None
        cells[..., 1:] = False
    assert look(one_key) == []
    assert {f.id for f in look(steps(6, sharp))} == {"attention.collapsed"}


@pytest.mark.parametrize(("value", "word"), [(np.inf, "+Inf"), (-np.inf, "-Inf")])
def test_an_infinite_log_sum_exp_is_named_with_its_head(value: float, word: str) -> None:
    def infinite(n: int, arrays: dict[str, Any]) -> None:
        if n == 4:
            arrays["lse"][1, 1] = value

    (finding,) = look(steps(6, infinite))
    assert (finding.id, finding.step, finding.layer, finding.head) == ("attention.lse", 4, 1, 1)
    assert finding.sentence == (
        f"The log-sum-exp of the newest row is {word} in head 1 of layer 1 in step 4, although the "
        f"row attends to {N + 4} keys."
    )


def test_a_row_without_keys_has_no_log_sum_exp_and_is_another_rules() -> None:
    def empty(n: int, arrays: dict[str, Any]) -> None:
        if n == 2:
            arrays["lse"][:] = -np.inf

    records = steps(4, empty)
    cells = records[2].masks[0].cells
    assert cells is not None
    cells[:] = False
    assert look(records) == []
