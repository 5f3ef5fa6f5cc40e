"""Pictures of the errors of a kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.drawing.difference_maps import difference_picture, reduce_max
from flexinspect.drawing.theme import Theme

PLAIN = Theme("none")


def picture(rows: np.ndarray, heads: np.ndarray, tolerance: float = 1e-3) -> list[str]:
    maps = {"rows": rows, "heads": heads, "errors": rows.ravel()}
    strips = difference_picture(maps, tolerance, PLAIN, width=80, height=8)
    assert max(strip.cell_length for strip in strips) <= 80
    return [strip.text for strip in strips]


def test_one_wrong_row_stands_out_and_nan_is_marked() -> None:
    rows = np.full((6, 16), 1e-8, np.float32)
    rows[4] = 1.0
    rows[5, 3] = np.nan
    lines = picture(rows, rows[:, :4].T.copy())
    start = next(n for n, text in enumerate(lines) if text.startswith("largest error by row")) + 1
    assert lines[start + 4][:16] == "█" * 16
    assert lines[start][:16].strip() == ""
    assert lines[start + 5][3] == "!"
    assert any("16 above the tolerance" in text for text in lines)


def test_errors_far_above_the_tolerance_still_differ_from_each_other() -> None:
    rows = np.full((4, 8), 1e-9, np.float32)
    rows[1], rows[2] = 1e3, 1e-4
    lines = picture(rows, rows[:, :2].T.copy(), tolerance=1e-6)
    start = next(n for n, text in enumerate(lines) if text.startswith("largest error by row")) + 1
    assert len({text[0] for text in lines[start : start + 4]}) == 3
    assert "1000; the middle is the tolerance, 1.0e-06" in lines[0]


def test_an_array_larger_than_the_picture_keeps_its_largest_errors() -> None:
    rows = np.zeros((400, 300), np.float32)
    rows[399, 299] = 5.0
    reduced = reduce_max(rows, 16, 80)
    assert reduced.shape == (16, 80)
    assert reduced[-1, -1] == 5.0
    assert reduced.sum() == 5.0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_reducing_never_loses_the_maximum(rows: int, columns: int, down: int, across: int) -> None:
    values = np.random.default_rng(rows * 41 + columns).random((rows, columns), np.float32)
    reduced = reduce_max(values, down, across)
    assert reduced.shape == (min(rows, down), min(columns, across))
    assert reduced.max() == values.max()


@pytest.mark.parametrize("tolerance", [0.0, float("inf"), 1e-30])
def test_an_odd_tolerance_still_gives_a_picture(tolerance: float) -> None:
    assert picture(np.zeros((2, 2), np.float32), np.zeros((1, 2), np.float32), tolerance)
