"""The small form of `make torture`: damaged traces through the commands, with fixed seeds."""

from __future__ import annotations

import shutil
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
    unpack(tmp_path)
    whole, copy = tmp_path / "generation.flextrace", tmp_path / "copy"
    found: list[list[tuple[str, bytes]]] = [[], []]
    for results in found:
        for seed in range(6):
            shutil.copy(whole, copy)
            results.append((mutate(copy, seed), copy.read_bytes()))
    assert found[0] == found[1]
    assert sum(data != whole.read_bytes() for _, data in found[0]) >= 5
