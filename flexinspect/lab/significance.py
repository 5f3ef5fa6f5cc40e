"""Intervals of accuracies, and tests of the difference between two methods on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 4000
_CELLS = 1 << 20  # of one draw of resamples


class Interval(Struct, frozen=True):
    """An estimate and the ends of its interval, at the confidence `LEVEL`."""

    value: float
    low: float
    high: float


def wilson_interval(n_right: int, n: int) -> Interval:
    """Return a share with its score interval. `n` must be above 0.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    It holds for independent samples, and lies within 0 and 1 also where all of them are right.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share, square = n_right / n, z * z / n
    center = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return Interval(share, max(center - half, 0.0), min(center + half, 1.0))


def bootstrap_interval(values: Floats, *, seed: int = 0) -> Interval:
    """Return the mean of one value per sample, (n,), with its percentile bootstrap interval.

    Samples are drawn with replacement, `RESAMPLES` times (B. Efron, 1979), so that the values of a
    sample (such as its paraphrases) stay together.
    """
    n = len(values)
    random = np.random.default_rng(seed)
    rows = max(_CELLS // n, 1)
    means = np.concatenate(
        [
            values[random.integers(0, n, (min(rows, RESAMPLES - start), n))].mean(1)
            for start in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of samples that only one of two methods answers right.

    Under equal accuracy each of these samples is right for either method with probability 1/2
    (Q. McNemar, 1947; exact form by the binomial distribution).
    """
    n = only_first + only_second
    tail = ways = 1  # of n over k, from k = 0
    for k in range(1, min(only_first, only_second) + 1):
        ways = ways * (n - k + 1) // k
        tail += ways
    return float(min(Fraction(2 * tail, 1 << n), Fraction(1)))


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (S. Holm, 1979), in the same order.

    Calling those below a level significant then errs with at most that probability in any of them.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = highest
    return adjusted
