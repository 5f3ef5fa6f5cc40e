"""A sample of the correct generations of `make clean-runs`: none gets an error or a warning.

Each runs in a child of a process that has loaded torch and nothing of other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.paths import TESTS

from benchmarks.clean_runs.cases import AXES, IMPOSSIBLE, draw
from benchmarks.clean_runs.runner import Outcome, read_log, summary, table

SEEDS = (
    *(5, 7, 8, 9, 12, 13, 17, 18, 19, 24, 26, 27, 28, 30),
    *(34, 36, 38, 39, 42, 43, 46, 47, 48, 50, 51, 54, 55, 61),
    *(67, 74, 93, 94, 142, 159, 170, 186, 205, 206, 224, 227, 267, 279),
    *(345, 355, 362, 370, 391, 416, 422, 427, 430, 440, 450, 486, 492, 500),
    *(512, 513, 574, 577),
)
"""Their first cases hold every family and every value of each axis that needs no other package."""
OTHER_PACKAGES = {("cache", "quanto"), ("cache", "hqq"), ("adapter", "peft")}
SCRIPT = """
import sys
import msgspec
from benchmarks.clean_runs.runner import run_case, warm_up
warm_up()
for seed in map(int, sys.argv[1:]):
    print(msgspec.json.encode(run_case(seed, 0)).decode(), flush=True)
"""
KILLED_UNDER_CAPTURE = """
import os, signal, threading
if any(one.name == "flexinspect-control" for one in threading.enumerate()):
    os.kill(os.getpid(), signal.SIGKILL)
"""
RUN_ANOTHER_PROGRAM = """
import sys
from pathlib import Path
from benchmarks.clean_runs import runner
runner.PROGRAM = Path(sys.argv[1])
print(runner.run_case(0, 0).failed)
"""
PEAK_MEMORY = """
import resource, sys
from benchmarks.clean_runs.program import main
main(int(sys.argv[1]), 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def run_first_cases(seeds: Sequence[int]) -> list[Outcome | None]:
    """Run the first case of each seed; None stands for one that transformers refuses."""
    lines = run_python(SCRIPT, *map(str, seeds))
    return [msgspec.json.decode(line, type=Outcome | None) for line in lines]


def run_python(code: str, *args: str) -> list[str]:
    """Run Python code in a process of its own; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=TESTS.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_sample_holds_every_value_of_every_axis() -> None:
    cases = [draw(seed) for seed in SEEDS]
    for axis, values in AXES.items():
        wanted = {value for value in values if (axis, value) not in OTHER_PACKAGES}
        assert {getattr(case, axis) for case in cases} == wanted, axis


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_correct_generation_of_the_sample_gets_an_error_or_a_warning() -> None:
    outcomes = run_first_cases(SEEDS)
    assert len(outcomes) == len(SEEDS)
    for seed, outcome in zip(SEEDS, outcomes, strict=True):
        assert outcome is not None, f"transformers refuses the first case of seed {seed}"
        assert outcome.is_clean, (outcome.command, outcome.alarms, outcome.failed)
    assert sum(outcome.judged > 0 for outcome in outcomes if outcome) > len(SEEDS) * 3 // 4


def test_a_seed_always_draws_the_same_case_and_another_one_with_each_attempt() -> None:
    assert draw(3) == draw(3)
    assert len({draw(3, attempt) for attempt in range(5)}) > 1
    assert not [case for case in map(draw, range(200)) for is_wrong in IMPOSSIBLE if is_wrong(case)]


def test_a_log_that_was_cut_off_goes_on_and_the_summary_counts_by_axis(tmp_path: Path) -> None:
    alarm = Outcome(seed=4, attempt=1, case=draw(4, 1), alarms=("mask.none: x",))
    clean = Outcome(seed=2, attempt=0, case=draw(2), judged=8)
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(map(msgspec.json.encode, (alarm, clean))) + b'\n{"seed": 5, "att')
    outcomes = read_log(log)
    assert outcomes == [clean, alarm]
    facts = summary(outcomes)
    assert (facts["runs"], facts["false_alarms"], facts["steps_compared"]) == (2, 1, 8)
    (found,) = facts["alarms"]
    assert found["command"].endswith("benchmarks/clean_runs/program.py 4 1")
    assert json.loads(json.dumps(facts)) is not None
    family = alarm.case.family
    assert facts["axes"]["family"][family]["false_alarms"] == 1
    assert f"| family | {family} |" in table(facts)


def test_a_run_that_was_killed_under_capture_alone_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLED_UNDER_CAPTURE)
    (failed,) = run_python(RUN_ANOTHER_PROGRAM, str(program))
    assert failed.startswith("the run ended as recording; SIGKILL ended it")


@pytest.mark.slow
def test_a_paged_cache_is_not_sized_for_the_memory_of_the_machine() -> None:
    seed = next(seed for seed in SEEDS if draw(seed).cache == "paged")
    assert int(run_python(PEAK_MEMORY, str(seed))[-1]) < 2000  # MB; 7,500 of a machine of 24 GB
