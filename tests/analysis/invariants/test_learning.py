"""Invariants learnt from good runs hold in other good runs, and planted faults break them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.good_runs import CALLS, INPUTS, PARAMETERS, write_run

from flexinspect.analysis.invariants.invariant import Invariant, Violation
from flexinspect.analysis.invariants.learning import judge, learn, unjudged
from flexinspect.analysis.invariants.observed_run import ObservedRun, observe_run

STEPS = 60


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[ObservedRun]:
    folder = tmp_path_factory.mktemp("good")
    return [observe_run(write_run(folder / f"{n}.flextrace", n)) for n in range(3)]


@pytest.fixture(scope="module")
def invariants(good: list[ObservedRun]) -> tuple[Invariant, ...]:
    return learn(good).invariants


def broken(invariants: Sequence[Invariant], path: Path, **how: Any) -> list[Violation]:
    return judge(invariants, observe_run(write_run(path / "new.flextrace", 99, **how)))


def kinds(found: Sequence[Violation]) -> set[tuple[str, str]]:
    return {(one.invariant.kind, one.invariant.subject) for one in found}


@pytest.mark.parametrize("seed", range(10, 16))
def test_another_good_run_breaks_nothing(
    seed: int, invariants: tuple[Invariant, ...], tmp_path: Path
) -> None:
    run = observe_run(write_run(tmp_path / "a.flextrace", seed))
    assert judge(invariants, run) == []
    assert unjudged(invariants, run) == []


def test_what_is_learnt_has_the_runs_and_steps_that_support_it(
    invariants: tuple[Invariant, ...],
) -> None:
    found = {(one.kind, one.subject, one.other): one for one in invariants}
    order = found["before", "clip_grad_norm_", "optimizer.step"]
    assert (order.runs, order.samples) == (3, 3 * STEPS)
    assert found["contains", "zero_grad", ""].samples == 3 * (STEPS - 1)
    assert found["proportional", "learning rate of group 1", "learning rate of group 0"].value == (
        pytest.approx(0.1)
    )
    rates = [
        one.first
        for one in invariants
        if (one.kind, one.subject) == ("constant", "learning rate of group 0")
    ]
    assert rates == [0, 1, 2, 5, 10, 20, 50, 59]
    assert found["monotone", "learning rate of group 0", ""].value == "falls"
    assert found["input", "input_ids", ""].value == "int64 4 x 16"
    assert found["parameter", "first.weight", ""].value == "float32 [8, 4], trained in group 0"
    assert found["at-most", "total gradient norm", "clip limit"].runs == 3
    assert ("falls", "loss", "") in found
    assert ("range", "loss", "") in found


def test_an_order_that_follows_from_two_others_is_not_listed(
    invariants: tuple[Invariant, ...],
) -> None:
    orders = {(one.subject, one.other) for one in invariants if one.kind == "before"}
    assert orders == set(itertools.pairwise(CALLS))


def set_field(name: str, at: int, value: Any) -> Callable[[int, dict[str, Any]], object]:
    def change(step: int, fields: dict[str, Any]) -> None:
        if step == at:
            fields[name] = value

    return change


WRONG_ORDER = ("zero_grad", "forward", "backward", "optimizer.step", "clip_grad_norm_")
FROZEN = {**PARAMETERS, "second.weight": {"dtype": "float32", "size": [4, 1], "group": None}}


@pytest.mark.parametrize(
    ("how", "kind", "step", "words"),
    [
        (
            {"calls": {12: WRONG_ORDER}},
            ("before", "clip_grad_norm_"),
            12,
            (
                "At step 12 optimizer.step came before clip_grad_norm_; in 3 good runs, 180 steps, "
                "clip_grad_norm_ always came first."
            ),
        ),
        (
            {"calls": dict.fromkeys(range(60), CALLS[1:])},
            ("contains", "zero_grad"),
            1,
            (
                "zero_grad was not called (the calls were forward, backward, clip_grad_norm_, "
                "optimizer.step) (and in 58 later steps); in 3 good runs, 177 steps, each step had "
                "it."
            ),
        ),
        (
            {"change": set_field("loss", 31, 400.0)},
            ("range", "loss"),
            31,
            "At step 31 loss is 400; in 3 good runs, ",
        ),
        (
            {"change": set_field("total_norm", 7, 1.4)},
            ("at-most", "total gradient norm"),
            7,
            "total gradient norm is 1.4, above clip limit 1;",
        ),
        (
            {"change": set_field("max_norm", 5, None)},
            ("present", "clip limit"),
            5,
            "At step 5 there is no finite clip limit;",
        ),
        (
            {"change": set_field("learning_rates", 9, (0.1, 0.01))},
            ("monotone", "learning rate of group 0"),
            9,
            "rises from 0.008667 to 0.1",
        ),
        (
            {"change": set_field("learning_rates", 9, (0.0085, 0.0085))},
            ("proportional", "learning rate of group 1"),
            9,
            "the first was 0.1 times the second",
        ),
        (
            {"change": set_field("group_ratios", 20, (1e-4, 0.0))},
            ("moves", "update ratio of second"),
            20,
            "update ratio of second is 0, although gradient norm of second is 0.",
        ),
        (
            {"change": set_field("learning_rates", 20, (0.005, 0.0005))},
            ("constant", "learning rate of group 0"),
            20,
            "learning rate of group 0 is 0.005; in 3 good runs, 3 steps, it was 0.006667 then.",
        ),
        (
            {"change": set_field("n_backward", 3, 2)},
            ("constant", "backward passes"),
            3,
            "backward passes is 2; in 3 good runs, 180 steps, it was 1 in each step.",
        ),
        (
            {"facts": {4: {"inputs": {**INPUTS, "labels": ["int64", 1, 16]}}}},
            ("input", "labels"),
            4,
            (
                "At step 4 input labels is int64 1 x 16; in 3 good runs, 180 steps, it was "
                "int64 4 x 16."
            ),
        ),
        (
            {"facts": {4: {"modes": ["evaluation"]}}},
            ("setting", "mode of the model"),
            4,
            "mode of the model is evaluation; ",
        ),
        (
            {"parameters": FROZEN},
            ("parameter", "second.weight"),
            None,
            (
                "Parameter second.weight is float32 [4, 1], frozen; in 3 good runs, it was "
                "float32 [4, 1], trained in group 0."
            ),
        ),
        (
            {"change": lambda _, fields: fields.update(loss=2.0)},
            ("changes", "loss"),
            2,
            "loss is 2 for the third time in succession",
        ),
        (
            {"change": lambda step, fields: fields.update(loss=2.0 - 0.001 * step)},
            ("falls", "loss"),
            None,
            "The loss ends at 0.97",
        ),
        ({"name": "training Other"}, ("part", "training Net"), None, "has no training Net (it has"),
    ],
)
def test_a_planted_fault_is_a_violation_with_its_step_and_the_learnt_bound(
    how: dict[str, Any],
    kind: tuple[str, str],
    step: int | None,
    words: str,
    invariants: tuple[Invariant, ...],
    tmp_path: Path,
) -> None:
    found = broken(invariants, tmp_path, **how)
    one = next(each for each in found if (each.invariant.kind, each.invariant.subject) == kind)
    assert one.step == step
    assert words in one.sentence


def test_what_a_run_left_out_breaks_is_dropped_and_reported(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{n}.flextrace", n) for n in range(3)]
    odd = write_run(tmp_path / "odd.flextrace", 3, set_field("n_backward", 30, 3))
    found = learn([observe_run(path) for path in (*paths, odd)])
    assert ("constant", "backward passes") not in {(o.kind, o.subject) for o in found.invariants}
    label, violations = found.left_out[3]
    assert label == "odd.flextrace"
    assert kinds(violations) == {("constant", "backward passes")}
    assert all(not each for _, each in found.left_out[:3])


def test_a_range_that_only_one_run_widens_is_dropped(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{n}.flextrace", n) for n in range(3)]
    odd = write_run(tmp_path / "odd.flextrace", 3, set_field("loss", 30, 1e5))
    found = learn([observe_run(path) for path in (*paths, odd)])
    assert [one.subject for one in found.dropped if one.kind == "range"] == ["loss"]


def test_a_time_is_judged_by_its_median_and_only_above_a_generous_bound(
    invariants: tuple[Invariant, ...],
) -> None:
    times = [one for one in invariants if one.subject == "step time (ms)"]
    assert {one.kind for one in times} == {"median"}
    assert all(one.low is None and one.high and one.high > 300 for one in times)


def test_one_run_teaches_no_ranges(tmp_path: Path) -> None:
    found = learn([observe_run(write_run(tmp_path / "a.flextrace", 0))]).invariants
    assert found
    assert not {one.kind for one in found} & {"range", "median", "falls", "total"}


def test_a_training_that_only_some_runs_have_is_not_learnt(tmp_path: Path) -> None:
    one = observe_run(write_run(tmp_path / "a.flextrace", 0))
    other = observe_run(write_run(tmp_path / "b.flextrace", 1, name="training Other"))
    assert learn([one, other]).invariants == ()


def test_ranks_that_part_are_a_violation_and_one_that_clips_alone_too(tmp_path: Path) -> None:
    def run(name: str, seed: int, **of_second: Any) -> ObservedRun:
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder / "t-rank0.flextrace", seed, rank=0)
        write_run(folder / "t-rank1.flextrace", seed, rank=1, **of_second)
        return observe_run(folder)

    found = learn([run("a", 0), run("b", 1)]).invariants
    equal = {one.subject for one in found if one.kind == "ranks-equal"}
    assert {"sampled weights of first", "clip limit", "total gradient norm"} <= equal
    assert judge(found, run("c", 2)) == []
    parted = judge(found, run("d", 2, weights={41: 1}))
    assert [one.sentence for one in parted] == [
        (
            "At step 41 sampled weights of first differs between rank 0 and rank 1; in 2 good "
            "runs, 120 steps, it was equal on all ranks."
        )
    ]
    alone = judge(found, run("e", 2, change=set_field("max_norm", 6, None)))
    assert {("present", "clip limit"), ("ranks-equal", "clip limit")} <= kinds(alone)
    assert any(one.sentence.startswith("Rank 1: At step 6 ") for one in alone)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.floats(-1e30, 1e30, allow_subnormal=False) | st.just(float("nan")),
        min_size=1,
        max_size=40,
    ),
    order=st.lists(st.permutations(CALLS), min_size=1, max_size=5),
)
def test_a_run_always_satisfies_what_was_learnt_from_it_and_itself(
    values: list[float], order: list[list[str]], tmp_path: Path
) -> None:
    def change(step: int, fields: dict[str, Any]) -> None:
        fields["loss"] = fields["total_norm"] = values[step]

    calls = {n: order[n % len(order)] for n in range(len(values))}
    path = tmp_path / f"{abs(hash((tuple(values), str(order))))}.flextrace"
    if not path.exists():
        write_run(path, 0, change, n_steps=len(values), calls=calls)
    run, again = observe_run(path), observe_run(path)
    assert judge(learn([run]).invariants, run) == []
    found = learn([run, again])
    assert found.dropped == ()
    assert judge(found.invariants, run) == []
