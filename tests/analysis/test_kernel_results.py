"""Baselines of kernels, tables of times, and the statement whether inputs changed the speed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.analysis.kernel_baseline import (
    is_new_fault,
    load_baseline,
    regressions,
    save_baseline,
)
from flexinspect.analysis.kernel_report import (
    ErrorStatistics,
    KernelEvaluation,
    ResultError,
    Tolerance,
)
from flexinspect.analysis.kernel_speed import SpeedReport, Timing, input_effect, speed_lines
from flexinspect.core.errors import UsageError


def evaluation(max_abs: float = 1e-6, **fields: Any) -> KernelEvaluation:
    error = ErrorStatistics(max_abs, max_abs / 10, 0, 0, 1, 1, 1, 100, 0, 0, 0)
    bar = Tolerance("eager", 10, 4e-7, 4e-8, 4e-6, 4e-7)
    base = {"kernel": "mine", "config": "a", "shape": "", "inputs": "normal", "device": "cpu"}
    return KernelEvaluation(
        **{**base, "status": "same", "error": error, "tolerance": bar, **fields}
    )


def test_the_same_numbers_are_no_regression(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(), evaluation(config="b")])
    assert [*regressions(load_baseline(file), [evaluation()])] == []


def test_the_first_configuration_that_got_worse_is_named_with_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(), evaluation(config="b"), evaluation(config="c")])
    now = [evaluation(), evaluation(3e-6, config="b"), evaluation(9e-6, config="c")]
    first = next(iter(regressions(load_baseline(file), now)))
    assert first.startswith("mine on b got worse: max error 3e-06, it was 1e-06; mean error")


def test_another_device_may_round_differently(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation()])
    assert [*regressions(load_baseline(file), [evaluation(1.5e-6)])]
    assert not [*regressions(load_baseline(file), [evaluation(1.5e-6, device="cuda")])]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"status": "differs"}, "it was within tolerance, and is not now"),
        ({"status": "not compared"}, "cannot be now"),
        ({"bit_equal": False}, "bit-equal, and are not now"),
        ({"lse": ResultError("LSE", float("inf"), 1e-6)}, "error of LSE not finite"),
    ],
)
def test_what_else_is_worse(tmp_path: Path, fields: dict[str, Any], part: str) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(lse=ResultError("LSE", 1e-7, 1e-6))])
    (sentence,) = regressions(load_baseline(file), [evaluation(**fields)])
    assert part in sentence


@pytest.mark.parametrize(
    ("before", "now", "is_new"),
    [
        ("differs", "differs", False),
        ("varies", "varies", False),
        ("same", "varies", True),
        ("varies", "differs", True),
        ("not compared", "differs", True),
        ("differs", "same", False),
    ],
)
def test_a_fault_that_the_baseline_has_is_not_new(
    tmp_path: Path, before: Any, now: Any, is_new: bool
) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(status=before)])
    assert is_new_fault(load_baseline(file), evaluation(status=now)) == is_new
    assert is_new_fault(load_baseline(file), evaluation(status=now, kernel="other")) == (
        now != "same"
    )


def test_a_baseline_of_other_kernels_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(kernel="other")])
    with pytest.raises(UsageError, match="none of these kernels"):
        [*regressions(load_baseline(file), [evaluation()])]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 9, "entries": []}'])
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError):
        load_baseline(file)


def test_infinite_errors_are_strict_json(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    save_baseline(file, [evaluation(float("inf"))])
    assert "Infinity" not in file.read_text("utf-8")
    assert load_baseline(file).entries[0].errors["max error"] is None


def test_rates_count_the_open_cells_only() -> None:
    timing = Timing("mine", 64, "normal", (2.0, 1.0, 3.0), flops=4_000_000_000, open_share=0.25)
    assert timing.median_ms == 2.0
    assert timing.tflops == pytest.approx(0.5)  # 1e9 operations in 2 ms


def test_the_table_has_the_ratio_to_sdpa_and_the_reasons() -> None:
    sdpa = Timing("sdpa", 64, "normal", (2.0, 2.0), 1000, 1.0)
    mine = Timing("mine", 64, "normal", (3.0, 3.0), 1000, 1.0)
    none = Timing("other", 64, "normal", (), 1000, 1.0, "It takes no mask.")
    lines = [*speed_lines(SpeedReport("shape", "cpu", (sdpa, mine, none)))]
    assert "1.50" in lines[4]
    assert lines[5].endswith("not timed. It takes no mask.")


def samples(kind: str, factor: float, n: int, noise: float) -> Timing:
    rng = random.Random(3)
    times = tuple(factor * (1 + noise * rng.random()) for _ in range(n))
    return Timing("mine", 64, kind, times, 1, 1.0)


def test_inputs_that_change_the_speed_are_told_from_those_that_do_not() -> None:
    normal = samples("normal", 1.0, 20, 0.02)
    slower = input_effect([normal, samples("raw", 1.2, 20, 0.02)], "raw")
    same = input_effect([normal, samples("raw", 1.0, 20, 0.02)], "raw")
    assert slower is not None
    assert same is not None
    assert "--range raw changed the speed: median ratio 1.200" in slower.sentence()
    assert "did not change the speed" in same.sentence()
    shuffled = Timing("mine", 64, "raw", tuple(1.0 + (i % 3) for i in range(20)), 1, 1.0)
    noisy = input_effect([samples("normal", 2.0, 20, 0.02), shuffled], "raw")
    assert noisy is not None
    assert "too noisy to tell" in noisy.sentence()


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_the_interval_of_the_median_holds_the_median(n: int, rng: random.Random) -> None:
    normal = Timing("mine", 1, "normal", tuple(1.0 for _ in range(n)), 1, 1.0)
    other = Timing("mine", 1, "unit", tuple(rng.uniform(0.5, 2) for _ in range(n)), 1, 1.0)
    effect = input_effect([normal, other], "unit")
    assert effect is not None
    assert effect.low <= effect.ratio <= effect.high
    assert effect.n_pairs == n
