"""Each planted fault is told by its class, with a proof; nothing is claimed for a right kernel."""

from __future__ import annotations

from typing import Any

import pytest
from support import planted_kernels as planted
from support.paths import DOCS

from flexinspect.analysis.kernel_report import KernelEvaluation
from flexinspect_hooks.kernels.kernel_evaluation import evaluate_kernel

SMALL = {"q_len": 80, "kv_len": 80, "head_dim": 32, "q_heads": 2, "kv_heads": 2}
FULL = {**SMALL, "name": "full"}
CAUSAL = {**SMALL, "name": "causal", "mask": "causal"}
HALF = {**CAUSAL, "name": "causal-bfloat16", "dtype": "bfloat16"}
GQA = {**CAUSAL, "name": "gqa", "q_heads": 8, "kv_heads": 2}
SOFTCAP = {**CAUSAL, "name": "softcap", "softcap": 2.0}
LONG = {"name": "long", "dtype": "float16", "q_heads": 1, "kv_heads": 1, "q_len": 16}
LONG |= {"kv_len": 1024, "head_dim": 32}


def evaluate(kernel: Any, config: dict[str, Any], **options: Any) -> KernelEvaluation:
    return evaluate_kernel(kernel, config, **options)


PLANTED: list[tuple[Any, dict[str, Any], str]] = [
    (planted.last_key_dropped, FULL, "last-key-dropped"),
    (planted.last_key_dropped, HALF, "last-key-dropped"),
    (planted.scale_missing, CAUSAL, "scale-missing"),
    (planted.scale_missing, HALF, "scale-missing"),
    (planted.mask_inverted, CAUSAL, "mask-inverted"),
    (planted.mask_inverted, HALF, "mask-inverted"),
    (planted.head_swapped, GQA, "key-head"),
    (planted.heads_repeated, GQA, "key-head"),
    (planted.block_border, CAUSAL, "block-border"),
    (planted.block_border, HALF, "block-border"),
    (planted.softcap_ignored, SOFTCAP, "softcap-ignored"),
    (planted.float16_sums, CAUSAL, "low-precision-sum"),
    (planted.float16_sums, LONG, "low-precision-sum"),
    (planted.RandomOrder(), CAUSAL, "random-order"),
    (planted.LostBlock(), FULL, "race"),
    (planted.stale_lse, FULL, "lse-stale"),
    (planted.stale_lse, HALF, "lse-stale"),
    (planted.LseOfTheCallBefore(), CAUSAL, "lse-stale"),
    (planted.wrong_dtype, HALF, "output-dtype"),
    (planted.nan_in_a_row, CAUSAL, "nan"),
    (planted.exchanged_values, CAUSAL, "inputs-exchanged"),
    (planted.exchanged_values, GQA, "inputs-exchanged"),
    (planted.keys_in_another_layout, CAUSAL, "layout"),
    (planted.shifted_values, CAUSAL, "key-shifted"),
    (planted.negative_scores, CAUSAL, "scale"),
    (planted.dropout_left_on, FULL, "random-numbers"),
    (planted.nan_lse, CAUSAL, "lse"),
    *(
        (planted.key_pointer_off, each, "pointer-offset")
        for each in (FULL, CAUSAL, HALF, GQA, LONG)
    ),
    *((planted.value_pointer_off, each, "pointer-offset") for each in (FULL, CAUSAL, HALF, LONG)),
    *((planted.rescale_missing, each, "rescale-missing") for each in (FULL, CAUSAL, HALF)),
    *((planted.softmax_over_rows, each, "softmax-axis") for each in (FULL, CAUSAL, HALF)),
    (planted.softcap_before_scale, SOFTCAP, "score-order"),
    (planted.softcap_before_scale, {**SOFTCAP, "dtype": "bfloat16"}, "score-order"),
    (planted.mask_after_softmax, CAUSAL, "mask-after-softmax"),
    (planted.mask_added_as_number, CAUSAL, "mask-as-numbers"),
    (planted.not_normalized, HALF, "not-normalized"),
    (planted.scores_as_weights, CAUSAL, "softmax-missing"),
    (planted.inputs_in_bfloat16, CAUSAL, "inputs-rounded"),
    (planted.last_column_dropped, CAUSAL, "columns-dropped"),
    (planted.batch_ignored, {**FULL, "batch": 2}, "inputs-of-batch-0"),
    *((planted.padding_unmasked, each, "padding-keys") for each in (FULL, CAUSAL, HALF)),
    (planted.last_rows_not_written, CAUSAL, "rows-missing"),
    *((planted.rows_misplaced, each, "output-misplaced") for each in (FULL, CAUSAL)),
    (planted.heads_misplaced, CAUSAL, "output-misplaced"),
    *((planted.scale_off, each, "scale") for each in (CAUSAL, HALF)),
    (planted.sum_off, CAUSAL, "weight-sum"),
    (planted.keys_quantized, CAUSAL, "unexplained"),  # and not sums of low precision
    (planted.keys_quantized, FULL, "unexplained"),
]


@pytest.mark.parametrize(("kernel", "config", "kind"), PLANTED)
def test_a_planted_fault_is_told_by_its_class(
    kernel: Any, config: dict[str, Any], kind: str
) -> None:
    one = evaluate(kernel, config)
    assert [each.kind for each in one.diagnoses] == [kind], str(one)
    assert f"class {kind}: " in str(one)
    assert not one.is_same
    # Another order of the additions is within the tolerance, and a fault nevertheless.
    assert one.status == ("varies" if kind == "random-order" else "differs")


@pytest.mark.parametrize(
    ("kernel", "config"),
    [case[:2] for case in PLANTED if case[2] in ("key-head", "block-border", "scale-missing")],
)
def test_the_proof_is_that_the_oracle_with_the_fault_gives_the_same_numbers(
    kernel: Any, config: dict[str, Any]
) -> None:
    (found,) = evaluate(kernel, config).diagnoses
    assert found.residual is not None
    assert found.error is not None
    assert found.residual < found.error / 20


BY_INPUT: dict[str, tuple[Any, dict[str, Any]]] = {
    "last key dropped": (planted.last_key_dropped, FULL),
    "scale missing": (planted.scale_missing, CAUSAL),
    "mask inverted": (planted.mask_inverted, CAUSAL),
    "one key head swapped": (planted.head_swapped, GQA),
    "block border off by one": (planted.block_border, CAUSAL),
    "softcap ignored": (planted.softcap_ignored, SOFTCAP),
    "softcap before scale": (planted.softcap_before_scale, SOFTCAP),
    "key pointer off by one": (planted.key_pointer_off, CAUSAL),
    "online softmax not rescaled": (planted.rescale_missing, CAUSAL),
    "softmax over rows": (planted.softmax_over_rows, FULL),
    "mask after the softmax": (planted.mask_after_softmax, CAUSAL),
    "sums in float16": (planted.float16_sums, CAUSAL),
    "blocks in random order": (planted.RandomOrder, CAUSAL),
    "a block lost at random": (planted.LostBlock, FULL),
    "stale LSE": (planted.stale_lse, FULL),
    "output in another dtype": (planted.wrong_dtype, HALF),
    "none": (planted.right, CAUSAL),
}


@pytest.mark.parametrize("fault", BY_INPUT)
def test_the_page_says_what_each_input_shows(fault: str) -> None:
    page = (DOCS / "kernels.md").read_text("utf-8")
    rows = (line for line in page.splitlines() if line.startswith(f"| {fault} |"))
    row = next(line for line in rows if line.count("|") == 6)
    stated = [cell.strip(" `") for cell in row.split("|")[2:-1]]
    kernel, config = BY_INPUT[fault]
    for inputs, cell in zip(("normal", "raw", "unit", "token"), stated, strict=True):
        fresh = kernel() if isinstance(kernel, type) else kernel  # it counts its calls
        one = evaluate(fresh, config, inputs=inputs, gradients=False)
        found = ", ".join(each.kind for each in one.diagnoses) or one.status
        assert found == cell, inputs


@pytest.mark.parametrize("inputs", ["normal", "raw", "unit", "token"])
@pytest.mark.parametrize("config", [FULL, CAUSAL, HALF, GQA, SOFTCAP, {**CAUSAL, "q_len": 33}])
def test_nothing_is_claimed_for_a_right_kernel(config: dict[str, Any], inputs: str) -> None:
    one = evaluate(planted.right, config, inputs=inputs, n_runs=2)
    assert one.is_same, str(one)
    assert one.diagnoses == ()


@pytest.mark.parametrize("mask", ["window:9", "prefix:11", "document:24", "padding:5"])
def test_masks_of_all_kinds_are_right_in_a_right_kernel(mask: str) -> None:
    one = evaluate(planted.right, {**CAUSAL, "mask": mask, "batch": 2}, n_runs=1)
    assert (one.status, one.diagnoses) == ("same", ()), str(one)
    assert one.n_empty_rows == (20 if mask == "padding:5" else 0)


def test_a_lost_key_passes_under_raw_and_the_report_says_why() -> None:
    raw = evaluate(planted.last_key_dropped, FULL, inputs="raw")
    assert raw.is_same
    assert "The softmax is saturated: in 100% of the rows" in raw.warnings[0]
    assert "does not rescale its sums gives the right output" in raw.warnings[1]
    assert "hide most mask faults" in raw.warnings[2]
    for inputs in ("unit", "token", "normal"):
        one = evaluate(planted.last_key_dropped, FULL, inputs=inputs)
        assert [each.kind for each in one.diagnoses] == ["last-key-dropped"]


def test_token_inputs_say_which_key_was_read() -> None:
    one = evaluate(planted.last_key_dropped, FULL, inputs="token")
    assert 0 < one.n_wrong_reads < one.n_reads
    assert "instead of key 79 of key head" in one.reads[0]
    swapped = evaluate(planted.head_swapped, GQA, inputs="token")
    assert "of key head 0 instead of key" in swapped.reads[0]
    assert all("head 5," in sentence for sentence in swapped.reads[:4])


def test_a_wrong_mask_is_told_from_wrong_arithmetic() -> None:
    mask = evaluate(planted.block_border, CAUSAL).key_use
    arithmetic = evaluate(planted.scale_missing, CAUSAL).key_use
    assert mask is not None
    assert arithmetic is not None
    assert mask.n_closed > 0
    assert "row 31, key 31 is open and had none" in mask.first
    assert (arithmetic.n_opened, arithmetic.n_closed) == (0, 0)
    assert arithmetic.max_weight > 0.1


def test_no_score_is_blamed_for_an_output_that_the_inputs_keep_right() -> None:
    calls = []

    def late(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        calls.append(1)  # right in the compared runs, other keys in those of the probe
        order = None if len(calls) <= 3 else [1, 2]
        return planted.flash(q, k, v, attn_mask, scale, None, order=order)[0]

    one = evaluate(late, FULL, inputs="raw", gradients=False)
    assert [each.kind for each in one.diagnoses] == ["other-keys"]


def test_a_kernel_that_overwrites_its_inputs_is_told_and_hurts_no_other() -> None:
    def scaled_in_place(q: Any, k: Any, v: Any, *, attn_mask: Any = None) -> Any:
        q *= 2
        return planted.flash(q, k, v, attn_mask, 32**-0.5 / 2, None)[0]

    one = evaluate(scaled_in_place, CAUSAL)
    assert [each.kind for each in one.diagnoses] == ["inputs-changed"]
    assert one.faults == ("It changed q in place.",)
    assert one.bit_equal
    assert one.key_use is not None
    assert one.key_use.max_weight < 1e-5
    assert not one.is_same


def test_a_gradient_that_is_missing_is_wrong() -> None:
    def detached(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        return planted.flash(q, k.detach(), v, attn_mask, scale, None)[0]

    one = evaluate(detached, CAUSAL, n_runs=1)
    (found,) = one.diagnoses
    assert (one.status, found.kind) == ("differs", "gradient")
    assert "dk is not" in found.sentence


def test_a_kernel_with_unnamed_options_is_told_to_name_them() -> None:
    one = evaluate(lambda q, k, v, **options: q, CAUSAL)
    assert one.status == "not compared"
    assert "name the options in its signature" in one.reason


def test_numbers_that_have_two_reasons_get_both() -> None:
    def square(q: Any, k: Any, v: Any, *, attn_mask: Any = None) -> Any:
        return planted.flash(q, k, v, attn_mask, 1 / 32, None)[0]

    (found,) = evaluate(square, CAUSAL).diagnoses
    assert "it is applied twice, or it is 1 / head size" in found.sentence


def test_inputs_beyond_the_range_of_a_dtype_are_not_the_fault_of_a_kernel() -> None:
    half = {**CAUSAL, "dtype": "float16", "q_len": 128, "kv_len": 128}
    one = evaluate("eager", half, inputs="raw", n_runs=1)
    assert (one.status, one.diagnoses) == ("not compared", ())
    assert "the inputs are out of its range" in one.reason
    assert evaluate(planted.right, half, inputs="raw", n_runs=1).is_same
    nan = evaluate(planted.nan_in_a_row, half, n_runs=1)
    assert nan.status == "differs"


def test_an_output_times_a_number_is_told_with_the_number() -> None:
    def halved(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        return planted.flash(q, k, v, attn_mask, scale, None)[0] * 0.5

    (found,) = evaluate(halved, HALF).diagnoses
    assert found.kind == "output-scaled"
    assert "the right one times 0.5" in found.sentence


def test_an_error_that_only_the_mean_shows_has_a_class_too() -> None:
    def biased(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        return planted.flash(q, k, v, attn_mask, scale, None)[0] * (1 + 4e-6)

    one = evaluate(biased, {**CAUSAL, "q_len": 240, "kv_len": 240}, inputs="unit")
    assert one.error is not None
    assert one.tolerance is not None
    assert one.error.max_abs <= one.tolerance.max_abs
    assert [each.kind for each in one.diagnoses] == ["output-scaled"], str(one)


def test_a_kernel_that_ignores_its_score_mod_loses_the_softcap_with_it() -> None:
    def plain(
        q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0, score_mod: Any = None
    ) -> Any:
        return planted.flash(q, k, v, attn_mask, scale, None)[0]

    (found,) = evaluate(plain, {**SOFTCAP, "score_mod": "alibi"}).diagnoses
    assert found.kind == "score-mod-ignored"
    assert found.sentence == "The softcap of 2 and the score_mod alibi are ignored."


def test_a_kernel_with_an_unknown_fault_is_not_given_a_class_of_its_own() -> None:
    def clipped(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        return planted.flash(q, k, v, attn_mask, scale, None)[0].clamp(-0.5, 0.5)

    one = evaluate(clipped, CAUSAL)
    assert [each.kind for each in one.diagnoses] == ["unexplained"]
    assert "uses the right keys" in one.diagnoses[0].sentence
