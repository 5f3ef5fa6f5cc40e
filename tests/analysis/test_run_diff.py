"""Two runs: what is aligned with what, how much is noise, and the first place beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.good_runs import write_run
from support.traces import LAYERS, N_PROMPT, RUN, sample_generation, sample_step

from flexinspect.analysis.run_diff import alignment, quantities
from flexinspect.analysis.run_diff.bisection import bisect_request
from flexinspect.analysis.run_diff.difference_text import comparison_lines, place_text
from flexinspect.analysis.run_diff.generations import Place
from flexinspect.analysis.run_diff.traces import Comparison, compare_traces
from flexinspect.core.errors import UsageError
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    GenerationEnd,
    GenerationRecord,
    InputsRecord,
    StepRecord,
)
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

Change = Callable[[StepRecord], StepRecord]


def clean(generation: int = 0, n: int = 3) -> list[StepRecord]:
    return [sample_step(step, generation, nan_at=None) for step in range(n)]


def write(
    path: Path,
    *generations: Sequence[StepRecord],
    prompts: Sequence[GenerationRecord] = (),
    **run: Any,
) -> Path:
    with TraceWriter.create(path, {**RUN, **run}) as writer:
        for number, steps in enumerate(generations):
            record = prompts[number] if prompts else sample_generation(number)
            writer.begin_generation(replace(record, generation=number))
            for step in steps:
                writer.write_step(replace(step, generation=number))
            writer.end_generation(GenerationEnd(number, "finished", "", record.segments, "eos"))
    return path


def compare(*paths: Path) -> Comparison:
    with open_trace(paths[0]) as a, open_trace(paths[1]) as b:
        if len(paths) == 2:
            return compare_traces(a, b)
        with open_trace(paths[2]) as repeat:
            return compare_traces(a, b, repeat=repeat)


def of_steps(tmp_path: Path, a: Sequence[StepRecord], b: Sequence[StepRecord]) -> Any:
    paths = write(tmp_path / "a.flextrace", a), write(tmp_path / "b.flextrace", b)
    return compare(*paths).generations[0]


def with_arrays(step: StepRecord, **values: Any) -> StepRecord:
    """Return a step with arrays of layer 1, by stream."""
    arrays = (ArrayRecord(name, np.asarray(array), 1) for name, array in values.items())
    return replace(step, arrays=(*step.arrays, *arrays))


def without_layer(step: StepRecord, layer: int) -> StepRecord:
    """Return a step without a layer, and the numbers of those after it one lower."""

    def moved(one: Any) -> Any:
        return replace(one, layer=one.layer - (one.layer > layer))

    kept = [n for n, call in enumerate(step.calls) if call.layer != layer]
    return replace(
        step,
        calls=tuple(moved(call) for call in step.calls if call.layer != layer),
        layer_stats=tuple(moved(stat) for stat in step.layer_stats if stat.layer != layer),
        arrays=tuple(replace(one, array=one.array[kept]) for one in step.arrays),
    )


def of_calls(step: StepRecord, change: Callable[[CallRecord], CallRecord | None]) -> StepRecord:
    return replace(step, calls=tuple(filter(None, map(change, step.calls))))


# -- alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_more_is_left_out_and_the_others_are_compared(layer: int, tmp_path: Path) -> None:
    found = of_steps(tmp_path, [without_layer(step, layer) for step in clean()], clean())
    assert found.layers.left_out == ((), (layer,))
    assert found.verdict == "same"
    text = "\n".join(found.layers.lines())
    assert "layers aligned by heads and statistics" in text
    assert f"left out: layer {layer} of B has no partner" in text


def test_a_layer_more_that_changes_what_follows_is_named_as_missing(tmp_path: Path) -> None:
    steps = []
    for step in clean():
        stats = [
            replace(one, norm=one.norm * 1.1, max=one.max * 1.1) if one.layer > 1 else one
            for one in step.layer_stats
        ]
        steps.append(without_layer(replace(step, layer_stats=tuple(stats)), 1))
    first = of_steps(tmp_path, clean(), steps).first
    assert (first.step, first.layer, first.reason) == (0, 2, "missing")
    assert "layer 1 of A, which B does not have, comes before it" in place_text(first)


def test_layers_of_other_names_are_aligned_by_number_and_named(tmp_path: Path) -> None:
    renamed = [
        replace(
            step,
            layer_stats=tuple(
                replace(one, module=f"transformer.h.{one.layer}") for one in step.layer_stats
            ),
        )
        for step in clean()
    ]
    found = of_steps(tmp_path, clean(), renamed)
    assert found.verdict == "same"
    assert found.layers.renamed == ("model.layers.0", "transformer.h.0")
    assert "A 0-3 with B 0-3 (model.layers.0 with transformer.h.0, ...)" in "\n".join(
        found.layers.lines()
    )


def test_generations_are_aligned_by_their_prompts(tmp_path: Path) -> None:
    one = sample_generation(0)
    tokens = (*one.tokens[:3], replace(one.tokens[3], token_id=999), *one.tokens[4:])
    other = replace(one, tokens=tokens)
    steps = [clean(), clean()]
    a = write(tmp_path / "a.flextrace", *steps, prompts=[one, other])
    b = write(tmp_path / "b.flextrace", *steps, prompts=[other, one])
    found = compare(a, b).generations
    assert [(each.generation, each.partner, each.verdict) for each in found] == [
        *((0, 1, "same"), (1, 0, "same"))
    ]


def test_a_prompt_in_parts_is_aligned_where_both_end_with_the_same_keys(tmp_path: Path) -> None:
    prefill, *rest = clean()
    hidden = np.arange(N_PROMPT * 4, dtype=np.float32).reshape(N_PROMPT, 4) + 1
    whole = with_arrays(prefill, hidden=hidden)
    first = replace(prefill, q_len=8, kv_after=8, tokens=(), calls=(), logits=None, arrays=())
    last = with_arrays(replace(prefill, step=1, q_len=N_PROMPT - 8, kv_before=8), hidden=hidden[8:])
    shifted = [replace(step, step=step.step + 1) for step in rest]
    found = of_steps(tmp_path, [whole, *rest], [first, last, *shifted])
    assert found.left_out == ((), (0,))
    assert found.verdict == "same"
    assert found.steps[0].rows == "13 against 5 rows"
    assert found.compared["hidden"].n_exact == 1


def test_steps_that_one_run_does_not_have_are_missing(tmp_path: Path) -> None:
    found = of_steps(tmp_path, clean(n=4), clean(n=2))
    assert (found.first.step, found.first.reason, found.verdict) == (2, "missing", "different")
    assert "A alone has steps 2-3" in found.first.text


@given(st.lists(st.integers(1, 40), unique=True), st.lists(st.integers(1, 40), unique=True))
def test_steps_are_aligned_in_order_and_none_is_lost(a: list[int], b: list[int]) -> None:
    step = sample_step(0)
    sides = [[replace(step, kv_after=n) for n in sorted(side)] for side in (a, b)]
    pairs = list(alignment.align_steps(*sides))
    for side, steps in enumerate(sides):
        assert [pair[side] for pair in pairs if pair[side] is not None] == steps
    both = [(x.kv_after, y.kv_after) for x, y in pairs if x is not None and y is not None]
    assert both == [(n, n) for n in sorted(set(a) & set(b))]


# -- the first place and its reason ---------------------------------------------------------------


def _other_dtype(call: CallRecord) -> CallRecord:
    return replace(call, dtype="bfloat16") if call.layer == 2 else call


def _without_third(call: CallRecord) -> CallRecord | None:
    return None if call.layer == 3 else call


Q = np.ones((2, 1, 4), np.float32)
CASES: dict[str, tuple[Change, tuple[Any, ...]]] = {
    "value": (lambda s: with_arrays(s, q=Q * 1.01), (1, "q", "value")),
    "shape": (lambda s: with_arrays(s, q=Q[:1]), (1, "q", "shape")),
    "dtype": (lambda s: with_arrays(of_calls(s, _other_dtype), q=Q), (2, "dtype", "dtype")),
    "missing": (
        lambda s: with_arrays(of_calls(s, _without_third), q=Q),
        (3, "attention calls", "missing"),
    ),
    "order": (
        lambda s: with_arrays(replace(s, calls=s.calls[::-1]), q=Q),
        (0, "attention calls", "order"),
    ),
    "position ids": (
        lambda s: with_arrays(replace(s, inputs=InputsRecord(1, ((7, 1),))), q=Q),
        (None, "position ids", "value"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_place_has_its_reason(name: str, tmp_path: Path) -> None:
    change, expected = CASES[name]
    plain = [replace(step, inputs=InputsRecord(1, ((3, 1),))) for step in clean()]
    a = [plain[0], with_arrays(plain[1], q=Q), plain[2]]
    found = of_steps(tmp_path, a, [plain[0], change(plain[1]), plain[2]])
    first: Place = found.first
    assert (first.step, first.layer, first.quantity, first.reason) == (1, *expected)
    assert found.verdict == "different"


def test_a_token_that_rounding_can_turn_is_said_to_be_one(tmp_path: Path) -> None:
    steps = clean()
    logits = steps[1].logits
    assert logits is not None
    one, two, *rest = logits.candidates
    moved = (replace(two, rank=0, logit=8.00005), replace(one, rank=1, logit=8.0), *rest)
    near = (replace(one, logit=8.00001), replace(two, logit=8.0), *rest)
    at = tmp_path
    ids = {"margin": 1e-5, "chosen_rank": 0}
    a, b = (
        replace(steps[1], logits=replace(logits, candidates=c, chosen_id=c[0].token_id, **ids))
        for c in (near, moved)
    )
    first = of_steps(at, [steps[0], a, steps[2]], [steps[0], b, steps[2]]).first
    assert (first.step, first.quantity) == (1, "token")
    assert "which a change of the logits by 5e-05 can turn" in first.text


def test_masks_without_cells_do_not_count_as_compared(tmp_path: Path) -> None:
    def basic(step: StepRecord, name: str) -> StepRecord:
        masks = tuple(replace(one, fingerprint=name, cells=None) for one in step.masks)
        return replace(of_calls(step, lambda call: replace(call, mask=name)), masks=masks)

    a, b = ([basic(clean()[0], name)] for name in ("one", "other"))
    found = of_steps(tmp_path, a, b)
    assert "mask" not in found.compared
    assert found.not_compared["mask"] == "their cells are not recorded at level basic"
    (tmp_path / "again").mkdir()
    assert of_steps(tmp_path / "again", a, a).compared["mask"].n == LAYERS


def test_attention_by_segment_is_compared_only_where_the_segments_are_the_same(
    tmp_path: Path,
) -> None:
    one = sample_generation(0)
    moved = replace(one.segments[1], stop=4), replace(one.segments[2], start=4)
    other = replace(one, segments=(one.segments[0], *moved, *one.segments[3:]))
    a = write(tmp_path / "a.flextrace", clean())
    found = compare(a, write(tmp_path / "b.flextrace", clean(), prompts=[other])).generations[0]
    assert found.not_compared["attention"] == "the segments differ"
    assert found.verdict == "same"


# -- noise ----------------------------------------------------------------------------------------


def shifted(step: StepRecord, by: float) -> StepRecord:
    return with_arrays(step, hidden=np.full((step.q_len, 4), 1 + by))


def test_the_coarser_dtype_sets_the_noise(tmp_path: Path) -> None:
    def low(step: StepRecord) -> StepRecord:
        return of_calls(step, lambda call: replace(call, dtype="bfloat16"))

    a = [shifted(step, 0) for step in clean()]
    found = of_steps(tmp_path, a, [low(shifted(step, 0.05)) for step in clean()])
    assert (found.verdict, found.noise.floor) == ("rounding", 0.1)
    assert "rounding in bfloat16 and float32" in found.noise.source


def two_layers(step: StepRecord, *shifts: float) -> StepRecord:
    """A step in bfloat16: q and hidden states of layer 0, then those of layer 1, are shifted."""
    names, heads = ("q", "hidden", "q", "hidden"), {"q": (1,), "hidden": ()}
    arrays = tuple(
        ArrayRecord(name, np.full((*heads[name], step.q_len, 4), 1 + by), n // 2)
        for n, (name, by) in enumerate(zip(names, shifts, strict=True))
    )
    step = of_calls(step, lambda call: replace(call, dtype="bfloat16"))
    return replace(step, arrays=(*step.arrays, *arrays))


@pytest.mark.parametrize(
    ("shifts", "run", "verdict", "limit"),
    [
        ((0, 0, 0, 0.004), {}, "different", (1, 2**-12)),
        ((0, 0, 0, 1e-4), {}, "rounding", None),  # a last bit of few numbers
        ((0.004, 0, 0, 0), {}, "rounding", None),  # nothing before it shows how both round
        ((0, 0.004, 0, 0), {}, "different", (0, 2**-12)),
        ((0, 0.004, 0, 0), {"versions": {"torch": "2.14"}}, "rounding", None),
        ((0, 0.004, 0, 0), {"threads": 7}, "rounding", None),
        ((0, 0, 0, 0.004), {"threads": 7}, "different", (1, 2**-12)),  # the same code in layer 0
        ((0, 0.2, 0, 0), {"threads": 7}, "different", (0, 0.1)),
        ((0, 1e-4, 0, 0.09), {}, "rounding", None),  # grown from a last bit
    ],
)
def test_the_first_difference_between_runs_that_round_alike_has_a_limit_of_its_own(
    shifts: tuple[float, ...],
    run: dict[str, Any],
    verdict: str,
    limit: tuple[int, float] | None,
    tmp_path: Path,
) -> None:
    one, other = ([two_layers(step, *by) for step in clean()] for by in ((0,) * 4, shifts))
    a, b = write(tmp_path / "a.flextrace", one), write(tmp_path / "b.flextrace", other, **run)
    found = compare(a, b).generations[0]
    assert found.verdict == verdict
    place = found.first and (found.first.layer, found.first.limit)
    assert place == limit
    text = "\n".join(comparison_lines(compare(a, b)))
    assert "for the first number that differs after equal ones" in text
    assert ("<- beyond noise" in text) == (verdict == "different")


def test_repeats_in_one_trace_lower_the_floor_of_runs_under_the_same_conditions(
    tmp_path: Path,
) -> None:
    one, again = ([shifted(step, by) for step in clean()] for by in (0, 1e-7))
    other = [shifted(step, 4e-6) for step in clean()]
    a = write(tmp_path / "a.flextrace", one, again)
    b = write(tmp_path / "b.flextrace", other)
    found = compare(a, b).generations[0]
    assert found.noise is not None
    assert found.noise.limit("hidden", 1) == pytest.approx(4e-7, rel=1e-3)
    assert (found.verdict, found.first and found.first.layer) == ("different", 1)
    elsewhere = write(tmp_path / "c.flextrace", other, versions={"torch": "2.14"})
    assert compare(a, elsewhere).generations[0].verdict == "rounding"


def test_a_repeat_that_the_user_names_sets_the_noise(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{by}.flextrace", [shifted(step, by) for step in clean()])
        for by in (0, 3e-3, 1e-3)
    ]
    found = compare(*paths).generations[0]
    assert found.verdict == "rounding"
    assert compare(*paths[:2]).generations[0].verdict == "different"
    lines = "\n".join(comparison_lines(compare(*paths)))
    assert "differences between A and" in lines
    assert "times 4" in lines


def test_a_repeat_that_is_equal_bit_by_bit_leaves_no_room_for_noise(tmp_path: Path) -> None:
    one, other, repeat = (
        write(tmp_path / f"{name}.flextrace", [shifted(step, by) for step in clean()])
        for name, by in (("one", 0), ("other", 1e-7), ("repeat", 0))
    )
    found = compare(one, other, repeat).generations[0]
    assert found.verdict == "different"
    assert found.noise is not None
    assert "equal bit by bit" in found.noise.source


def test_equal_nan_is_no_difference_and_another_nan_is_an_infinite_one() -> None:
    a = np.array([1.0, math.nan, math.inf])
    assert quantities.relative_difference(a, a) == 0
    assert quantities.relative_difference(a, np.array([1.0, 2.0, math.inf])) == math.inf
    assert quantities.relative_difference(np.zeros(3), np.array([3.0, 0, 4])) == 5


# -- training -------------------------------------------------------------------------------------

GROUPS = ("model.layers.0", "lm_head")


def training(path: Path, *changes: tuple[int, dict[str, Any]], n: int = 6, **run: Any) -> Path:
    """Write a training whose steps differ from the plain ones by `changes` (step, fields)."""
    record = replace(
        sample_generation(0), tokens=(), declared={"training": {"groups": list(GROUPS)}}
    )
    with TraceWriter.create(path, {**RUN, **run}) as writer:
        writer.begin_generation(record)
        for number in range(n):
            step = TrainingStepRecord(
                2.0 - number / 10, "reported", (0.1,), 3.0, group_norms=(1.0, 2.0)
            )
            for at, fields in changes:
                step = replace(step, **fields) if at <= number else step
            writer.write_step(StepRecord(0, number, "train", 0, 0, 0, 0.0, 1.0, 0.1, training=step))
        writer.end_generation(GenerationEnd(0, "finished", "", ()))
    return path


@pytest.mark.parametrize(
    ("fields", "quantity", "text"),
    [
        ({"loss": 1.5}, "loss", "1.8 against 1.5"),
        ({"group_norms": (1.0, 2.5)}, "gradient norm", "2 against 2.5, lm_head"),
        ({"learning_rates": (0.2,)}, "learning rate", "0.1 against 0.2, optimizer group 0"),
        ({"is_skipped": True}, "skipped step", "0 against 1"),
        ({"loss": math.nan}, "loss", "1.8 against nan"),
    ],
)
def test_the_first_step_and_quantity_of_two_trainings_are_named(
    fields: dict[str, Any], quantity: str, text: str, tmp_path: Path
) -> None:
    a = training(tmp_path / "a.flextrace")
    comparison = compare(a, training(tmp_path / "b.flextrace", (2, fields)))
    (found,) = comparison.trainings
    assert comparison.verdict == "different"
    assert found.first is not None
    assert (found.first.step, found.first.quantity, found.first.text) == (2, quantity, text)


def test_trainings_are_not_bisected(tmp_path: Path) -> None:
    a, b = (training(tmp_path / f"{n}.flextrace", (n, {"loss": 9.0})) for n in (1, 2))
    with pytest.raises(UsageError, match="A and B are trainings"):
        bisect_request(compare(a, b))


def test_equal_trainings_are_the_same_only_in_what_was_compared(tmp_path: Path) -> None:
    a, b = (training(tmp_path / f"{name}.flextrace", seed=n) for n, name in enumerate("ab"))
    lines = "\n".join(comparison_lines(compare(a, b)))
    assert "6 steps compared, of 6 in A and 6 in B" in lines
    assert "gradient norm            12  0" in lines
    assert "not compared: activations (no level records them)" in lines
    assert "loss scale" in lines
    assert "No difference in anything that was compared." in lines


def test_a_training_that_ends_earlier_differs_at_its_end(tmp_path: Path) -> None:
    a, b = (training(tmp_path / f"{n}.flextrace", n=n) for n in (6, 4))
    (found,) = compare(a, b).trainings
    assert found.first is not None
    assert (found.first.step, found.first.reason) == (4, "missing")
    assert found.n_compared == 4


def test_the_noise_of_a_repeated_training_grows_with_its_steps(tmp_path: Path) -> None:
    a = training(tmp_path / "a.flextrace")
    repeat = training(tmp_path / "r.flextrace", (3, {"group_norms": (1.0, 2.002)}))
    early = training(tmp_path / "b.flextrace", (2, {"group_norms": (1.0, 2.002)}))
    late = training(tmp_path / "c.flextrace", (3, {"group_norms": (1.0, 2.002)}))
    found = [compare(a, other, repeat).trainings[0].first for other in (early, late)]
    assert (found[0] and found[0].step, found[1]) == (2, None)


def test_calls_inputs_and_limits_of_trainings_are_compared(tmp_path: Path) -> None:
    def first(name: str, **how: Any) -> Place | None:
        with (
            open_trace(tmp_path / "a.flextrace") as a,
            open_trace(write_run(tmp_path / name, 0, **how)) as b,
        ):
            (training,) = compare_traces(a, b).trainings
            return training.first

    write_run(tmp_path / "a.flextrace", 0)
    order = ("zero_grad", "forward", "clip_grad_norm_", "backward", "optimizer.step")
    other = {"inputs": {"input_ids": ["int64", 4, 8]}}
    found = [
        first("calls.flextrace", calls={7: order}),
        first("inputs.flextrace", facts={9: other}),
        first("limit.flextrace", change=lambda _, fields: fields.update(max_norm=2.0)),
        first("passes.flextrace", change=lambda _, fields: fields.update(n_backward=2)),
    ]
    assert [(one.step, one.quantity) for one in found if one is not None] == [
        *((7, "calls of the step"), (9, "sizes of inputs")),
        *((0, "clip limit"), (0, "backward passes")),
    ]
    assert first("same.flextrace") is None
