"""The small form of `make torture`: some seeds of each part, the same ones each time."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flexinspect_hooks.control import http_app
from tools.torture import control_attacks, faults, recordings
from tools.torture.__main__ import Run, summary
from tools.torture.judged import Problem, problem_of
from tools.torture.mutants import unpack
from tools.torture.parts import PARTS
from tools.torture.results import Result
from tools.torture.scenarios import SCENARIOS
from tools.torture.soak import Usage, growth
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
    "decoders": 10,
    "hostile-inputs": 90,
    "control": 21,
    "soak": 3,
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


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in which another user may read; those of pytest are the superuser's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_a_step_that_is_lost_or_changed_is_found(scratch: Path) -> None:
    path, told = scratch / recordings.NAME, list[str]()
    recordings.write(path, told.append, 0, 1, 4)
    assert recordings.judge(path, tuple(told), scratch) == []
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM steps WHERE step = 2")
        db.execute("UPDATE steps SET entropy = 9 WHERE step = 1")
    found = recordings.judge(path, tuple(told), scratch)
    assert {"step 0 2", "step 0 1 differs"} <= set(found)
    assert "read-only: step 0 2" in found


def test_a_trace_that_a_kill_leaves_unreadable_is_found(scratch: Path) -> None:
    scenario = next(one for one in SCENARIOS if one.name == "record")
    assert scenario.judge(scratch, (), ()) == []
    assert scenario.judge(scratch, (), ("created",)) == ["there is no trace"]
    (scratch / recordings.NAME).write_bytes(b"not a trace")
    assert any("not a flexinspect trace" in each for each in scenario.judge(scratch, (), ()))


def test_an_open_control_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(http_app._Guard, "_check_access", lambda *_: None)
    target = control_attacks.prepare(tmp_path)
    for kind in (control_attacks.wrong_token, control_attacks.other_host):
        assert kind(target, random.Random(0))


def test_a_hostile_input_that_ends_in_a_traceback_is_found() -> None:
    def fail() -> None:
        raise KeyError("deep")

    found = problem_of(fail)
    assert found is not None
    assert found.kind == "traceback"
    assert problem_of(lambda: print("\x1b[2J")) == Problem("control character", "'\\x1b'")
    assert problem_of(lambda: 3) == Problem("exit code", "3")
    assert problem_of(lambda: 2) is None


def test_a_leak_is_found() -> None:
    first = Usage(100.0, 8, 2)
    assert growth(first, Usage(110.0, 8, 2)) == []
    assert growth(first, Usage(200.0, 9, 3)) == [
        "memory: 100 to 200 MiB",
        "descriptors: 8 to 9",
        "threads: 2 to 3",
    ]


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
