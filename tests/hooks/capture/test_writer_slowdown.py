"""What the writer thread costs is read from the steps during which it works."""

from __future__ import annotations

import pytest

from flexinspect_hooks.capture.writer_slowdown import WriterSlowdown


def slowdown(quiet: list[float], busy: list[float]) -> WriterSlowdown:
    """Return what these steps show, which alternate as far as they go."""
    found, rest = WriterSlowdown(), list(busy)
    for number, seconds in enumerate(quiet):
        found.add(seconds, is_busy=False)
        if rest and number % 4 == 3:
            found.add(rest.pop(0), is_busy=True)
    for seconds in rest:
        found.add(seconds, is_busy=True)
    return found


def test_busy_steps_are_measured_by_quiet_ones() -> None:
    assert slowdown([0.010] * 20, [0.015] * 4).seconds == pytest.approx(0.020)


def test_steps_in_which_the_machine_did_something_else_are_no_measure() -> None:
    quiet = [0.010] * 12 + [0.300] + [0.010] * 8
    assert slowdown(quiet, [0.012] * 5).seconds == pytest.approx(0.010)


def test_a_pause_of_the_program_is_no_cost_of_the_writer() -> None:
    assert slowdown([0.010] * 20, [0.012, 0.012, 3.3]).seconds == pytest.approx(0.004)


def test_a_pause_before_the_first_quiet_step_is_no_cost_either() -> None:
    found = WriterSlowdown()
    for seconds in (0.012, 3.3, 0.012):
        found.add(seconds, is_busy=True)
    for _ in range(20):
        found.add(0.010, is_busy=False)
    assert found.seconds == pytest.approx(0.004)


def test_a_writer_that_costs_nothing_costs_no_less() -> None:
    assert slowdown([0.010] * 20, [0.009] * 4).seconds == 0


@pytest.mark.parametrize(("n_quiet", "n_busy"), [(0, 9), (7, 9), (20, 1), (0, 0)])
def test_few_steps_show_nothing(n_quiet: int, n_busy: int) -> None:
    assert slowdown([0.010] * n_quiet, [0.020] * n_busy).seconds is None
