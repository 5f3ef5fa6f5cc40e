"""The newest rows of all steps have the weights from which the trace was made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.attention_trace import SyntheticGeneration, write

from flexinspect.panels.attention.newest_rows import load_newest_rows
from flexinspect.panels.base import TracePlace


def test_each_step_has_the_weights_of_its_newest_row(tmp_path: Path) -> None:
    synthetic = SyntheticGeneration()
    source = write(tmp_path / "a.flextrace", synthetic)
    shares: list[float] = []
    rows = load_newest_rows(source, TracePlace(layer=1, head=3), 4, shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    for row in rows:
        assert row is not None
        expected = synthetic.weights(1, 3, len(row) - 1)
        np.testing.assert_allclose(row, expected, atol=1e-5)
    assert len({len(row) for row in rows if row is not None}) == 4


def test_a_window_leaves_earlier_positions_without_weight(tmp_path: Path) -> None:
    source = write(tmp_path / "a.flextrace", SyntheticGeneration(window=4))
    row = load_newest_rows(source, TracePlace(), 4)[-1]
    assert row is not None
    assert not row[:-4].any()


def test_what_is_not_recorded_or_does_not_match_is_unknown(tmp_path: Path) -> None:
    basic = write(tmp_path / "basic.flextrace", SyntheticGeneration(level="advanced"))
    assert load_newest_rows(basic, TracePlace(), 4) == [None] * 4
    other = write(tmp_path / "other.flextrace", SyntheticGeneration(stored=(0,)))
    rows = load_newest_rows(other, TracePlace(layer=1), 4)
    assert rows == [None] * 4
    assert load_newest_rows(other, TracePlace(layer=9), 2) == [None, None]
