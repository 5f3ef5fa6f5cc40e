"""The benchmark of large traces runs in a small form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.synthetic import MOST_CELLS
from flexinspect.trace.reader import open_trace

pytestmark = pytest.mark.slow


def test_traces_of_two_sizes_and_a_live_run_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(scale, "N_KEYS", 2)
    monkeypatch.setattr(scale, "LOADED_S", 0.3)
    steps, tokens = {"short": 40, "long": 80}, {"wide": 300}
    facts = scale.measure(tmp_path, steps=steps, tokens=tokens, rounds=1, live_s=1.0)
    assert list(facts["traces"]) == ["short", "long", "wide"]
    assert facts["traces"]["short"]["key_cpu_s_ratio"] == 1
    assert all(one["resident_mb"] > 1 for one in facts["traces"].values())
    assert facts["live"]["cpu_percent"] > 0
    assert "| wide |" in scale.table(facts)


def test_a_live_run_is_recorded_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "live.flextrace"
    assert scale.record_live(path, 0.06) == 60
    with open_trace(path) as reader:
        assert reader.n_steps(0) == 60
        assert reader.generation(0).state == "finished"


def test_a_mask_of_too_many_cells_has_its_tables_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_CELLS >= 32_768**2
    monkeypatch.setattr("benchmarks.synthetic.MOST_CELLS", 1000)
    made = scale.synthetic._Made(scale.synthetic._prompt([50] * 8, 1), 1, thin=False)
    mask = made._prefill_mask()
    assert mask.cells is None
    assert mask.partial is not None
    assert mask.full is not None
    assert mask.partial.any()
