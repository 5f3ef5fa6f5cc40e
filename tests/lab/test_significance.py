"""Intervals and tests, against values that were computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexinspect.lab.significance import (
    bootstrap_interval,
    holm_adjusted,
    mcnemar_exact,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("n_right", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),  # the example of many textbooks
        (0, 10, 0.0, 0.2775),  # z²/(n + z²) = 3.8415/13.8415
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_the_score_interval(n_right: int, n: int, low: float, high: float) -> None:
    found = wilson_interval(n_right, n)
    assert found.value == n_right / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 5, 2 / 32),
        (1, 9, 2 * (1 + 10) / 1024),
        (9, 1, 2 * (1 + 10) / 1024),
        (2, 6, 2 * (1 + 8 + 28) / 256),
    ],
)
def test_mcnemar_by_the_binomial_distribution(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar_exact(only_first, only_second) == p


def test_mcnemar_of_many_samples_does_not_overflow() -> None:
    assert 0 < mcnemar_exact(400, 2000) < 1e-200
    assert mcnemar_exact(5000, 5100) == pytest.approx(0.3247, abs=2e-3)  # normal approximation


def test_holm_multiplies_by_the_number_that_remain_and_never_falls() -> None:
    assert holm_adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjusted([0.6, 0.5]) == [1.0, 1.0]
    assert holm_adjusted([]) == []


def test_the_bootstrap_of_shares_is_near_the_normal_interval_and_repeatable() -> None:
    values = np.array([0.0, 1.0] * 200)
    found = bootstrap_interval(values)
    half = 1.96 * math.sqrt(0.25 / 400)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.006)
    assert bootstrap_interval(values) == found


def test_the_bootstrap_of_equal_values_has_no_width() -> None:
    found = bootstrap_interval(np.full(7, 0.25))
    assert (found.low, found.value, found.high) == (0.25, 0.25, 0.25)
