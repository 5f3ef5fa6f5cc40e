"""The small form of `make torture`: damaged traces through the commands, with fixed seeds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.torture.__main__ import run, unpack
from tools.torture.trace_mutations import mutate

pytestmark = pytest.mark.slow


def test_damaged_traces_end_in_a_sentence() -> None:
    n_done, failures = run(0, 24, time.time() + 240, None)
    assert failures == []
    assert n_done == 24


def test_a_seed_damages_a_trace_in_the_same_way_each_time(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        unpack(folder)
        trace = folder / "generation.flextrace"
        before = trace.read_bytes()
        found.append((mutate(trace, 7), trace.read_bytes()))
        assert found[-1][1] != before
    assert found[0] == found[1]
