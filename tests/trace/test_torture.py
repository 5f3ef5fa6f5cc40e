"""The small form of `make torture`: some seeds of each part, the same ones each time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import tty
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flexinspect_hooks.control import http_app
from tools.torture import (
    control_attacks,
    faults,
    recordings,
    shutdowns,
    trace_readers,
    viewer_kills,
)
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
    "shutdowns": 8,
    "control": 21,
    "viewers": 3,
    "debug-adapter": 1,
    "soak": 3,
}


FIRST_SEEDS = {"shutdowns": 12}
"""Where a part begins with something else than its first seeds: here quick commands."""


def test_each_part_has_a_small_form() -> None:
    assert set(SEEDS) == set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_a_few_seeds_of_each_part_find_nothing(name: str) -> None:
    if PARTS[name].injects and (reason := faults.missing()):
        pytest.skip(reason)
    run = Run()
    run.run(PARTS[name], FIRST_SEEDS.get(name, 0), SEEDS[name], time.time() + 240)
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


def test_a_command_that_goes_on_or_leaves_the_terminal_in_disorder_is_found() -> None:
    command, number = shutdowns.Command("open x"), signal.SIGTERM

    def judged(code: int | None, seconds: float, said: bytes = b"") -> list[str]:
        return shutdowns._judge(command, number, shutdowns.Ended(code, seconds, said, True))

    assert judged(143, 0.5) == judged(-15, 0.5) == judged(0, 0.5) == []
    assert "took more than" in judged(143, 500.0)[0]
    assert "was killed" in judged(None, 500.0)[0]
    assert "ended with 9" in judged(9, 0.5)[0]
    screens = shutdowns.ALTERNATE_SCREEN, shutdowns.MAIN_SCREEN
    assert judged(143, 0.5, b"".join(screens)) == []
    assert judged(143, 0.5, screens[0]) == ["left the terminal on the alternate screen"]


def test_a_command_that_ignores_its_signal_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdowns, "PATIENCE_S", 1.0)
    monkeypatch.setattr(shutdowns.warm, "popen", lambda: _deaf)
    session = shutdowns.Session(shutdowns.Command("x"), tmp_path, tmp_path, "", is_fresh=False)
    assert session.end(signal.SIGTERM, 1.0).code is None
    assert session.left_behind() == []


def _deaf(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code], **options)


def test_a_terminal_that_is_left_in_disorder_is_found() -> None:
    terminal = viewer_kills.Terminal()
    os.write(terminal.inner, viewer_kills.ALTERNATE_SCREEN)
    tty.setraw(terminal.inner)
    assert terminal.disorder() == [
        "the terminal is left on the alternate screen",
        "the modes of the terminal are changed",
    ]


def test_a_control_character_in_a_file_that_a_command_writes_is_found(tmp_path: Path) -> None:
    def write(trace: Path, out: Path, seed: int) -> None:
        (out / "page.html").write_text("<p>\x1b[2J</p>")

    found = trace_readers.Reader("writer", write).problem(tmp_path, tmp_path)
    assert found == Problem("control character", "'\\x1b' in page.html")


def test_a_command_that_lacks_memory_is_found() -> None:
    def fail() -> int:
        print("There is not enough memory for this command.", file=sys.stderr)
        return 2

    assert problem_of(fail) is None
    found = problem_of(fail, may_lack_memory=False)
    assert found is not None
    assert found.kind == "memory"


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
