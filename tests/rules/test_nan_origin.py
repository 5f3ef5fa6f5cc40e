"""Which part of an attention call is nonfinite, by the log-sum-exp of its newest row."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.traces import sample_step

from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.nan_and_inf import find_nonfinite_part


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("lse", "part"),
    [
        ([-np.inf, 1.0], "row without keys"),
        ([-np.inf, 70_000.0], "row without keys"),
        ([np.nan, np.nan], "queries or keys"),
        ([70_000.0, np.nan], "scores"),
        ([-70_000.0, 1.0], "scores"),
        ([1.0, 2.0], "values"),
    ],
)
def test_a_float16_call_is_checked_by_its_finite_scores(lse: list[float], part: str) -> None:
    step = sample_step(3)
    call = replace(step.calls[0], dtype="float16", lse_error=np.nan)
    arrays = tuple(
        replace(one, array=np.array([lse]))
        if one.stream == "attention.lse"
        else replace(one, array=one.array[:1])
        for one in step.arrays
    )
    found = find_nonfinite_part(replace(step, calls=(call,), arrays=arrays), 0, RuleContext())
    assert found is not None
    assert found.name == part
