"""Who is late in collective calls: matching, waits, and the clocks of several machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rank_traces import Call, write_training

from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
from flexinspect.analysis.ranks.waiting import Waiting, _waits, measure_waiting


def measure(
    folder: Path, calls: Sequence[Mapping[int, Sequence[Call]]], **facts: Sequence[Any]
) -> Waiting:
    """Write a rank for each of `calls`; `facts` have one value per rank."""
    for rank, own in enumerate(calls):
        each = {name: values[rank] for name, values in facts.items()}
        n_steps = max(own, default=0) + 1
        path = folder / f"t-rank{rank}.flextrace"
        write_training(path, rank, len(calls), calls=own, n_steps=n_steps, **each)
    run, _ = find_run(folder)
    with open_ranks(run) as readers:
        return measure_waiting(run, readers)


def reduce_at(*entries: float, end: float) -> list[Call]:
    return [("all_reduce", entered, end) for entered in entries]


def test_the_rank_that_enters_last_in_most_steps_is_late(tmp_path: Path) -> None:
    on_time = {step: reduce_at(10.0 * step, end=10.0 * step + 2.1) for step in range(5)}
    late = {step: reduce_at(10.0 * step + 2.0, end=10.0 * step + 2.1) for step in range(5)}
    found = measure(tmp_path, [on_time, late, on_time])
    assert found.late == 1
    assert (found.n_calls, found.n_steps, found.n_last) == (5, 4, (0, 4, 0))
    assert found.waited_s == pytest.approx((8.0, 0.0, 8.0))  # without the first step
    assert found.late_s == pytest.approx((0.0, 8.0, 0.0))
    assert found.total_s == pytest.approx(32.1)
    assert found.steps[0, 0].late_s == pytest.approx((0.0, 2.0, 0.0))
    assert found.steps[0, 2].last_call == "all_reduce"


def test_no_rank_is_late_when_they_take_turns_or_only_the_start_was_late(tmp_path: Path) -> None:
    early = {step: reduce_at(step + 0.2 * (step % 2), end=step + 0.3) for step in range(1, 7)}
    other = {step: reduce_at(step + 0.2 * (1 - step % 2), end=step + 0.3) for step in range(1, 7)}
    start = ({0: reduce_at(0.0, end=0.9)}, {0: reduce_at(0.8, end=0.9)})
    found = measure(tmp_path, [early | start[0], other | start[1]])
    assert found.late is None
    assert found.n_last == (3, 3)


def test_in_a_few_steps_no_rank_is_called_late(tmp_path: Path) -> None:
    calls = [{n: reduce_at(n + 0.5 * rank, end=n + 0.6) for n in range(4)} for rank in range(2)]
    assert measure(tmp_path, calls).late is None


def test_calls_that_do_not_end_together_are_no_waits(tmp_path: Path) -> None:
    calls = [{0: [("broadcast", 1.0 + rank, 5.0), ("send", 1.0, 2.0)]} for rank in range(2)]
    assert measure(tmp_path, calls) == Waiting()


def test_ranks_that_make_other_calls_in_a_step_are_named(tmp_path: Path) -> None:
    same = [("all_reduce", 1.0, 2.0)]
    found = measure(tmp_path, [{0: same, 1: same}, {0: same, 1: [("all_gather", 1.0, 2.0)]}])
    (other,) = found.others
    assert (other.step, dict(other.kinds)) == (1, {0: ("all_reduce",), 1: ("all_gather",)})
    assert list(found.steps) == [(0, 0)]


def test_ranks_of_other_process_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    calls = [{0: reduce_at(1.0 + rank, end=9.0)} for rank in range(4)]
    groups = ((0, 1), (0, 1), (2, 3), (2, 3))
    found = measure(tmp_path, calls, group=groups)
    assert found.steps[0, 0].waited_s == (1.0, 0.0, 1.0, 0.0)


def test_the_clocks_of_two_machines_are_aligned_by_the_ends_of_their_calls(tmp_path: Path) -> None:
    ahead = 7.5
    jitter = (0.0, 1e-4, -1e-4, 0.0, 0.0)
    first = {n: reduce_at(10.0 * n, end=10.0 * n + 3) for n in range(5)}
    second = {
        n: reduce_at(10.0 * n + 2 + ahead, end=10.0 * n + 3 + ahead + jitter[n]) for n in range(5)
    }
    found = measure(tmp_path, [first, second], hostname=("a", "b"))
    assert found.clocks["b"].offset_s == pytest.approx(ahead, abs=1e-4)
    assert (found.clocks["b"].n, found.clocks["b"].spread_s < 1e-3) == (5, True)
    assert found.late == 1
    assert found.late_s[1] == pytest.approx(8.0, abs=1e-3)


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=5))
def test_each_rank_waits_for_the_last_one_and_only_that_is_late(entered: list[list[float]]) -> None:
    import numpy as np

    times = np.array(entered)
    waited, late = _waits(times, np.full_like(times, 1000.0))
    last = times.max(axis=1)
    np.testing.assert_allclose(waited, last[:, None] - times)
    assert ((late > 0).sum(axis=1) <= 1).all()
    assert (late[late > 0] <= waited.max(axis=1).max()).all()
    np.testing.assert_allclose(late.sum(axis=1), last - np.sort(times, axis=1)[:, -2])
