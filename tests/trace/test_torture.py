"""The small form of `make torture`: some seeds of each part, the same ones each time."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tools.torture import faults
from tools.torture.__main__ import Run, summary
from tools.torture.mutant_commands import unpack
from tools.torture.parts import PARTS
from tools.torture.results import Result
from tools.torture.trace_mutations import mutate

pytestmark = pytest.mark.slow

SEEDS = {
    "mutants": 16,
    "crash-points": 40,
    "random-kills": 14,
    "model-kills": 4,
    "model-faults": 7,
    "live-faults": 24,
    "io-faults": 28,
    "hostile-inputs": 90,
}


def test_each_part_has_a_small_form() -> None:
    assert set(SEEDS) == set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_a_few_seeds_of_each_part_find_nothing(name: str) -> None:
    if PARTS[name].injects and (reason := faults.missing()):
        pytest.skip(reason)
    run = Run()
    run.run(PARTS[name], 0, SEEDS[name], time.time() + 240)
    assert [one for one in run.results if one.failures] == []
    assert len(run.results) == SEEDS[name]


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


def test_a_run_goes_on_after_its_last_seed(tmp_path: Path) -> None:
    out, part = tmp_path / "results.jsonl", PARTS["random-kills"]
    first = Run(out)
    first.run(part, 0, 2, time.time() + 60)
    again = Run(out)
    again.resume()
    assert again.results == first.results
    assert again.next_seed(part, 0) == 2
    assert again.next_seed(PARTS["mutants"], 7) == 7


def test_the_summary_counts_failures_and_says_how_to_repeat_them() -> None:
    failure = {"kind": "lost or refused", "detail": "step 0 3", "how": "record: after 3 ms"}
    results = [Result("crash-points", n, [failure] * (n > 3), 0.5) for n in range(6)]
    lines = [line.strip() for line in summary(results).splitlines()]
    assert lines[1] == "crash-points            6        2        3  kills at calls"
    assert "2  crash-points: lost or refused: step 0 3" in lines
    assert lines[-1] == "python -m tools.torture crash-points --first-seed 4 --seeds 1"
