"""An explosion is judged by the run's own history, not by an absolute norm."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from flexinspect_hooks.training.measurement import NormHistory


def judged(*norms: float, ratio: float = 0.0) -> list[bool]:
    history = NormHistory()
    return [bool(history.explosion(norm, lambda: ratio)) for norm in norms]


def test_large_norms_from_the_first_step_on_are_no_explosion() -> None:
    assert not any(judged(1013.0, *([900.0] * 40)))


def test_a_norm_far_above_those_before_explodes_and_does_not_become_the_measure() -> None:
    assert judged(*([1.0] * 20), 5e3, 5e3, 1.0) == [False] * 20 + [True, True, False]
    reason = NormHistory()
    reason.explosion(2.0, lambda: 0.0)
    text = reason.explosion(4000.0, lambda: 0.0)
    assert text == "the norm of the gradients is 2,000 times that of the step before"


def test_norms_below_ten_never_explode() -> None:
    assert not any(judged(*([1e-4] * 20), 9.0))


def test_norms_that_scatter_by_powers_of_ten_do_not_explode() -> None:
    scatter = random.Random(0)
    assert not any(judged(*(10 ** scatter.gauss(0.5, 0.8) for _ in range(300))))


def test_the_first_step_is_judged_by_its_weights() -> None:
    assert judged(1e8, ratio=1e7) == [True]
    assert judged(1e8, ratio=10.0) == [False]


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=60), st.floats(1e-3, 1e3))
def test_non_finite_norms_are_left_to_other_findings(norms: list[float], scale: float) -> None:
    history = NormHistory()
    for norm in norms:
        history.explosion(norm * scale, lambda: 0.0)
    assert history.explosion(math.inf, lambda: 0.0) == ""
    assert history.explosion(math.nan, lambda: 0.0) == ""
