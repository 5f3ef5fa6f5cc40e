"""Isolation: planted leaks are found where they enter, and clean runs stay bit-equal."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import DEMO
from support.planted_leaks import (
    ROWS,
    SPANS,
    hooked,
    isolated,
    mask_for,
    model_of,
    only,
    other_mask,
    prompt,
    proved,
    serious,
)
from support.tiny import COMMON, FAMILIES, ids, make_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import flexinspect
from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records.finding import Severity

LEAK, ISOLATED = "proof.leak", "proof.isolated"
AS_DECLARED, MIXED = "proof.as-declared", "proof.paraphrases-mixed"
BACKENDS = ("eager", "sdpa")


def assert_mixed_as_declared(proof: Proof) -> None:
    """Assert that no row leaks, and that the paraphrases are not called isolated."""
    assert proof.holds
    assert [one.id for one in serious(proof)] == [MIXED]
    assert "causal declares" in only(proof, AS_DECLARED).sentence
    assert ISOLATED not in [one.id for one in proof.findings]


# -- clean runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_family_under_an_isolating_mask_moves_nothing_at_all(
    family: str, backend: str, dtype: torch.dtype
) -> None:
    model = model_of(family, backend).to(dtype)
    proof = proved(model, isolated(), mask="segment-isolation")
    assert serious(proof) == []
    assert "bit-equal in all 3 layers" in only(proof, ISOLATED).sentence
    assert all(change["largest"] == 0.0 for change in proof.facts["changed"])
    first = proof.facts["changed"][0]
    assert (first["label"], first["rows_kept"], first["rows_moved"]) == ("paraphrase 1", 9, 0)
    assert (first["readers"], first["readers_moved"]) == (5, 3)  # the separator reads only itself


def test_a_plain_causal_model_never_moves_what_comes_before() -> None:
    proof = proved(model_of(), mask="causal")
    assert_mixed_as_declared(proof)
    assert [one["rows_kept"] for one in proof.facts["changed"]] == [1, 7, 9, 17]


def test_paraphrases_that_read_each_other_are_not_called_isolated() -> None:
    proof = proved(model_of(), mask="causal")
    assert proof.facts["paraphrases_read"] == {"paraphrase 2": ["paraphrase 1"]}
    assert proof.lines[-1] == "  paraphrases against each other: paraphrase 2 reads paraphrase 1"
    sentence = only(proof, MIXED).sentence
    assert sentence.endswith("mask causal allows: paraphrase 2 reads paraphrase 1.")
    proof = proved(model_of(), isolated(), mask="segment-isolation")
    assert proof.facts["paraphrases_read"] == {}
    assert only(proof, ISOLATED).sentence.endswith(" No paraphrase reads another.")
    leak = proved(model_of(), mask="segment-isolation")
    assert leak.facts["paraphrases_read"] == {"paraphrase 2": ["paraphrase 1"]}
    assert [one.id for one in leak.findings if one.id in (MIXED, ISOLATED, AS_DECLARED)] == []


def test_without_a_mask_separators_are_open_to_all_rows() -> None:
    cells = isolated()
    cells[9:, 7:9] = True  # paraphrase 2 reads the separator, which reads only itself
    assert serious(proved(model_of(), cells)) == []


def test_a_left_padded_batch_is_compared_over_real_rows() -> None:
    short, long = ids(8, 1), ids(12, 2)
    input_ids = torch.tensor([[0] * 4 + list(short), list(long)])
    real = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    for backend in BACKENDS:
        proof = flexinspect.prove(
            *("isolation", model_of("llama", backend), input_ids),
            segments=[(4, 7, "a"), (7, 10, "b")],
            mask="causal",
            attention_mask=real,
        )
        assert_mixed_as_declared(proof)
        padding, first, *_ = proof.facts["changed"]
        assert (padding["label"], padding["rows_kept"]) == ("padding", 8 + 12)
        assert first["rows_kept"] == 12


def test_a_sliding_window_is_not_a_leak_and_unread_segments_are_a_note() -> None:
    model = model_of("mistral", num_hidden_layers=1)
    proof = proved(model, mask="causal")
    assert_mixed_as_declared(proof)
    unread = only(proof, "proof.unread")
    assert unread.evidence["unread"] == ["paraphrase 1"]
    assert "does not read paraphrase 1, which it may attend to" in unread.sentence


def test_decode_steps_are_rows_like_any_other() -> None:
    model = model_of()

    def run(input_ids: Tensor) -> None:
        cache = model(input_ids[:, :16], use_cache=True).past_key_values
        for pos in range(16, ROWS):
            cache = model(input_ids[:, pos : pos + 1], past_key_values=cache).past_key_values

    proof = proved(model, run=run, mask="causal")
    assert_mixed_as_declared(proof)
    assert proof.facts["rows"] == ROWS


def test_a_whole_call_of_generate_can_be_the_run() -> None:
    model = model_of()

    def run(input_ids: Tensor) -> None:
        model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=3, do_sample=False
        )

    assert_mixed_as_declared(proved(model, run=run, mask="causal"))
    leak = only(proved(model, run=run), LEAK)
    assert (leak.layer, leak.positions[0]) == (0, 9)


# -- planted leaks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_open_cell_leaks_in_layer_0_at_its_row(family: str, backend: str) -> None:
    cells = isolated()
    cells[13, 4] = True
    leak = only(proved(model_of(family, backend), cells), LEAK)
    assert (leak.severity, leak.layer, leak.positions) == (Severity.ERROR, 0, (13,))
    assert leak.sentence.startswith("Changing paraphrase 1 (positions 1 to 6) moves position 13 ")
    assert "of paraphrase 2 in layer 0 by " in leak.sentence
    assert ", directly" in leak.sentence
    assert leak.evidence["changed"] == ["paraphrase 1"]
    assert leak.evidence["through"] == []


def through_separators() -> np.ndarray:
    cells = isolated()
    cells[7, :8] = cells[8, :9] = True
    cells[9:, 7:9] = True
    return cells


def test_a_leak_through_separators_names_them_and_the_layer_after() -> None:
    leak = only(proved(model_of(), through_separators()), LEAK)
    assert (leak.layer, leak.positions) == (1, tuple(range(9, 17)))
    assert leak.evidence["through"] == [7, 8]
    assert "in layer 1 by " in leak.sentence
    assert ", through position 7 " in leak.sentence
    assert ", position 8 " in leak.sentence
    assert "with these rows restored, it does not move" in leak.sentence


def test_a_carrier_separator_gets_no_second_finding() -> None:
    leak = only(proved(model_of(), through_separators(), mask="segment-isolation"), LEAK)
    assert leak.evidence["changed"] == ["paraphrase 1"]


def test_isolated_separators_do_not_leak() -> None:
    cells = through_separators()
    cells[7:9, 1:7] = False
    assert serious(proved(model_of(), cells)) == []


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_one_layer_that_fell_back_to_causal_is_named(family: str, layer: int) -> None:
    model = model_of(family)
    layers = model.gpt_neox.layers if family == "gpt_neox" else model.model.layers
    causal = mask_for(model, np.tri(ROWS, dtype=np.bool_))
    with other_mask(layers[layer], causal):
        leak = only(proved(model, isolated(), mask="segment-isolation"), LEAK)
    assert (leak.layer, leak.positions) == (layer, tuple(range(9, 17)))
    assert "directly" in leak.sentence
    assert leak.head is None
    assert serious(proved(model, isolated(), mask="segment-isolation")) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", [0, 3])
def test_a_leak_in_one_head_names_the_head(backend: str, head: int) -> None:
    cells = np.repeat(isolated()[None], 4, axis=0)
    cells[head, 12, 2] = True
    leak = only(proved(model_of("qwen3", backend), cells), LEAK)
    assert (leak.layer, leak.head, leak.positions) == (0, head, (12,))
    assert f"only in head {head} of 4" in leak.sentence


def test_spans_counted_without_the_bos_leak_at_the_last_row() -> None:
    spans = ((0, 6, ""), (8, 16, ""))
    cells = isolated(spans)
    leak = only(proved(model_of(), cells), LEAK)
    assert (leak.layer, leak.positions) == (0, (16,))
    assert "of paraphrase 2" in leak.sentence


def test_padding_that_is_read_is_a_leak_from_the_padding() -> None:
    input_ids = torch.tensor([[0] * 4 + list(ids(8, 1))])
    real = torch.tensor([[0] * 4 + [1] * 8])
    model = model_of()
    options: dict[str, Any] = {"segments": [(4, 7, "a"), (7, 10, "b")], "mask": "causal"}
    proof = flexinspect.prove(
        *("isolation", model, input_ids),
        attention_mask=real,
        run=lambda changed: model(changed),  # the padding mask never reaches the model
        **options,
    )
    leak = only(proof, LEAK)
    assert leak.evidence["changed"] == ["padding"]
    assert (leak.layer, leak.positions[0]) == (0, 4)


def test_another_sequence_of_the_batch_that_moves_is_a_leak() -> None:
    model = model_of()
    input_ids = torch.cat((prompt(1), prompt(2)))
    mix = lambda out: out + 0.1 * out.mean(0, keepdim=True)  # noqa: E731
    with hooked(model.model.layers[1], mix):
        leak = only(
            flexinspect.prove("isolation", model, input_ids, segments=SPANS, mask="causal"), LEAK
        )
    assert leak.layer == 1
    assert leak.evidence["batch_row"] == 1
    assert "of sequence 1 of the batch in layer 1" in leak.sentence
    clean = flexinspect.prove("isolation", model, input_ids, segments=SPANS, mask="causal")
    assert_mixed_as_declared(clean)


def test_rows_mixed_outside_attention_are_reported() -> None:
    model = model_of()
    with hooked(model.model.layers[2].mlp, lambda out: out + out.mean(1, keepdim=True)):
        leak = only(proved(model, isolated(), mask="segment-isolation"), LEAK)
    assert leak.layer == 2
    assert "not by the layer's attention" in leak.sentence


def test_rows_mixed_before_the_layers_are_reported() -> None:
    model = model_of()
    with hooked(model.model.embed_tokens, lambda out: out - out.mean(1, keepdim=True)):
        leak = only(proved(model, isolated(), mask="segment-isolation"), LEAK)
    assert leak.layer is None
    assert "before the first layer" in leak.sentence


def test_a_mask_open_to_the_future_moves_earlier_rows() -> None:
    everything = np.ones((ROWS, ROWS), np.bool_)
    leak = only(proved(model_of(), everything, mask="causal"), LEAK)
    assert (leak.layer, leak.positions[0]) == (0, 0)


def test_a_decode_step_with_too_many_keys_is_found_in_its_row() -> None:
    model = model_of()
    spec = MaskSpec("own", (0, 18), (0, 0), (0, 9))  # rows from 18 on begin at position 9
    cells = spec.dense(ROWS)

    def run(input_ids: Tensor, *, offset: int) -> None:
        whole = mask_for(model, cells)
        cache = model(input_ids[:, :18], attention_mask=whole[:, :, :18, :18]).past_key_values
        for pos in (18, 19):
            row = whole[:, :, pos : pos + 1, : pos + 1] if offset else None
            cache = model(
                input_ids[:, pos : pos + 1], attention_mask=row, past_key_values=cache
            ).past_key_values

    # What rows 9 to 17 read of paraphrase 1 reaches row 18 through them, from layer 1 on.
    reached = only(proved(model, run=lambda input_ids: run(input_ids, offset=1), mask=spec), LEAK)
    assert (reached.layer, reached.positions) == (1, (18, 19))
    assert "the declared mask itself allows that path" in reached.sentence
    leaky = proved(model, run=lambda input_ids: run(input_ids, offset=0), mask=spec)
    assert (only(leaky, LEAK).layer, only(leaky, LEAK).positions) == (0, (18, 19))


# -- chance ----------------------------------------------------------------------------------------


def test_a_nondeterministic_run_is_evaluated_above_its_noise() -> None:
    model = model_of()
    noise = lambda out: out + 1e-6 * torch.randn_like(out)  # noqa: E731
    with hooked(model.model.layers[0], noise):
        proof = proved(model, isolated(), mask="segment-isolation")
        assert serious(proof) == []
        unstable = only(proof, "proof.unstable")
        assert unstable.severity is Severity.NOTE
        assert "The same ids, run again, gave states that differ by up to " in unstable.sentence
        assert "within the noise of the run" in only(proof, ISOLATED).sentence
        cells = isolated()
        cells[13, 4] = True
        leak = only(proved(model, cells), LEAK)
    assert (leak.layer, leak.positions) == (0, (13,))
    assert leak.evidence["noise"] > 0


def experts() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **COMMON, num_local_experts=4)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def batch_dependent_rounding(out: Tensor) -> Tensor:
    """Perturb the last bits of each row depending on all rows.

    Expert layers do this on some processors, where the kernel depends on how many rows are routed
    together.
    """
    combined = int(out.double().sum() * 2**20) % 16
    return out * (1 + combined * torch.finfo(out.dtype).eps)


def test_rounding_in_expert_layers_is_not_a_leak() -> None:
    model = experts()
    with hooked(model.model.layers[0].mlp, batch_dependent_rounding):
        proof = proved(model, isolated(), mask="segment-isolation")
        assert serious(proof) == []
        noise = only(proof, "proof.unstable")
        assert noise.evidence["rounding"]
        assert "Rounding moves rows that do not read the changed segment" in noise.sentence
        causal = mask_for(model, np.tri(ROWS, dtype=np.bool_))
        with other_mask(model.model.layers[1], causal):
            leak = only(proved(model, isolated(), mask="segment-isolation"), LEAK)
    assert (leak.layer, leak.positions) == (1, tuple(range(9, 17)))


def test_dropout_is_a_warning_that_names_the_training_mode() -> None:
    model = make_model("llama", attention_dropout=0.5).train()
    unstable = only(proved(model, mask="causal"), "proof.unstable")
    assert unstable.severity is Severity.WARNING
    assert unstable.sentence.endswith("The model is in training mode.")


def test_nan_in_both_runs_is_not_a_leak() -> None:
    model = model_of()

    def nan_in_row_3(out: Tensor) -> Tensor:
        return out.index_fill(1, torch.tensor([3]), torch.nan)

    with hooked(model.model.layers[2], nan_in_row_3):
        assert serious(proved(model, isolated(), mask="segment-isolation")) == []


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": None}, "Nothing declares which segments are isolated."),
        ({"segments": [(1, 7, "a")]}, "Nothing declares which segments are isolated."),
        ({"segments": [(1, 7, "a"), (9, 40, "b")]}, "declared up to position 40"),
        ({"segments": ["What is it?", (9, 12, "b")]}, "is not in the prompt"),
        ({"mask": "isolation"}, "The mask 'isolation' is unknown"),
        ({"mask": 3}, "mask must be the name of a preset"),
        ({"seed": 0, "masks": 1}, "takes no option masks="),
        (
            {"run": lambda input_ids: None},
            "The run had 0 rows in the input of the layers, but 20 ids",
        ),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        proved(model_of(), **options)
    assert message in error.value.sentence()


def test_a_run_that_ignores_its_ids_is_refused() -> None:
    model, input_ids = model_of(), prompt()
    with pytest.raises(UsageError, match="the input of the layers did not change"):
        proved(model, run=lambda changed: model(input_ids))
    with pytest.raises(UsageError, match="The run had 12 rows"):
        proved(model, run=lambda changed: model(changed[:, :12]))


def test_an_unknown_proof_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no proof 'isolate'; the proofs are isolation, order"):
        flexinspect.prove("isolate", model_of(), prompt())


# -- sentences -------------------------------------------------------------------------------------


def test_segments_as_texts_are_located_and_rows_have_token_texts() -> None:
    folder = DEMO
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model_of(vocab_size=len(tokenizer))
    question, other = "Who wrote Emma?", "Emma was written by whom?"
    proof = flexinspect.prove(
        *("isolation", model, f"{question}\n{other}\nAnswer:"),
        segments=[question, other],
        tokenizer=tokenizer,
    )
    leak = only(proof, LEAK)
    assert "Changing Who wrote Emma? (positions 1 to 10) moves position 12" in leak.sentence
    assert 'position 12 "E" of Emma was written by who… in layer 0' in leak.sentence
    assert proof.facts["changed"][0]["label"] == question


def test_a_proof_prints_what_it_did_and_gives_itself_as_json() -> None:
    proof = proved(model_of(), isolated(), mask="segment-isolation")
    assert proof.holds
    first, _, second, *_ = str(proof).splitlines()
    assert first == (
        "isolation under segment-isolation (declared): 3 layers, 20 rows; "
        "the same ids twice: bit-equal"
    )
    assert second.strip() == (
        "paraphrase 1 (6 tokens): 9 rows kept; read by cue; not read by separator 1"
    )
    facts = json.loads(json.dumps(proof.as_json()))
    assert (facts["proof"], facts["holds"]) == ("isolation", True)
    assert facts["findings"][0]["id"] == ISOLATED
