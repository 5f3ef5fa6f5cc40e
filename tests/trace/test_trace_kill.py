"""`kill -9` at any moment leaves a valid file with every step that was reported written."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.trace_samples import same, step
from support.warm_python import Popen

from flexinspect.core.errors import TraceError
from flexinspect.trace.file import connections
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

CHILD = """
import os, sys
from support.trace_samples import generation, end, step
from flexinspect.trace.file import writer as module
module.WAL_LIMIT_PAGES = int(sys.argv[2])
module.WAL_TIDY_BYTES = 0
steps_each = int(sys.argv[3])
writer = module.TraceWriter.create(sys.argv[1], {"model": "demo"})
os.write(1, b"ready\\n")
for number in range(10_000):
    writer.begin_generation(generation(number))
    for step_number in range(steps_each):
        writer.write_step(step(step_number, number))
        os.write(1, b"%d %d\\n" % (number, step_number))
    writer.end_generation(end(number, steps_each))
"""

MOMENTS = 24


def record_and_kill(path: Path, after_s: float, wal_limit: int, steps_each: int) -> bytes:
    """Let a child write until it is killed; return what it reported."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = Popen(
        [sys.executable, "-c", CHILD, path, str(wal_limit), str(steps_each)],
        stdout=subprocess.PIPE,
        env=environ,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    time.sleep(after_s)
    child.send_signal(signal.SIGKILL)
    reported = child.stdout.read()
    child.stdout.close()
    child.wait()
    return reported


def reported_steps(reported: bytes) -> list[tuple[int, int]]:
    whole = reported[: reported.rfind(b"\n") + 1].splitlines()
    return [(int(line.split()[0]), int(line.split()[1])) for line in whole]


def check(path: Path, reported: list[tuple[int, int]]) -> None:
    """Read with flexinspect first, as it must not repair anything, then with SQLite."""
    with open_trace(path) as reader:
        assert reader.state == "recording"
        for number, step_number in [*reported[:5], *reported[-5:]]:
            assert same(reader.record(number, step_number), step(step_number, number))
        recorded = {
            (row.generation, one.step)
            for row in reader.generations()
            for one in reader.steps(row.generation)
        }
        assert recorded >= set(reported)
        last = max(recorded, default=None)
        if last is not None:  # one more than reported may be there, and is whole, too
            assert same(reader.record(*last), step(last[1], last[0]))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_killed_recording_keeps_all_finished_steps(tmp_path: Path, moment: int) -> None:
    rng = random.Random(moment)
    path = tmp_path / "run.flextrace"
    # Every third child folds its WAL all the time, so that kills hit that, too.
    wal_limit = 20 if moment % 3 == 0 else 16_384
    reported = record_and_kill(path, rng.uniform(0.0, 0.25), wal_limit, rng.choice([3, 1000]))
    check(path, reported_steps(reported))


def test_reading_a_killed_recording_leaves_no_new_files(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    record_and_kill(path, 0.5, 16_384, 1000)
    before = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    with open_trace(path) as reader:
        assert reader.n_steps(0) > 0
    assert {file.name for file in tmp_path.iterdir()} == set(before)
    assert path.stat().st_size == before[path.name]
    assert path.with_name(path.name + "-wal").stat().st_size == before[path.name + "-wal"]


def raise_full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


CHANGE_AND_DIE = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")  # changed pages reach the file before the end
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE tokens SET text = text || hex(randomblob(4000))")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def half_changed(finished: Path, tmp_path: Path) -> Path:
    """A finished trace, and the rollback journal of a process that was killed in a change."""
    path = Path(shutil.copy(finished, tmp_path / "run.flextrace"))
    subprocess.run([sys.executable, "-c", CHANGE_AND_DIE, path], check=False)
    assert path.read_bytes() != finished.read_bytes()
    assert path.with_name("run.flextrace-journal").stat().st_size
    return path


def test_a_change_that_a_kill_cut_off_is_undone(finished: Path, half_changed: Path) -> None:
    with open_trace(half_changed) as reader:
        assert reader.state == "finished"
    assert half_changed.read_bytes() == finished.read_bytes()
    assert [file.name for file in half_changed.parent.iterdir()] == ["run.flextrace"]


def in_a_read_only_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roll_back = connections.roll_back
    is_copy = lambda file: file.parent != path.parent  # noqa: E731
    monkeypatch.setattr(connections, "roll_back", lambda file: is_copy(file) and roll_back(file))


def test_a_change_that_a_kill_cut_off_is_undone_in_a_copy_if_the_folder_is_read_only(
    finished: Path, half_changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_read_only_folder(half_changed, monkeypatch)
    before = half_changed.read_bytes()
    with open_trace(half_changed) as reader, open_trace(finished) as whole:
        assert reader.tokens(0) == whole.tokens(0)
        (folder,) = {Path(reader._connections._source).parent}
    assert folder != half_changed.parent
    assert half_changed.read_bytes() == before


def test_a_change_that_cannot_be_undone_is_refused_with_what_to_do(
    half_changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_read_only_folder(half_changed, monkeypatch)
    monkeypatch.setattr(shutil, "copyfile", raise_full_disk)
    with pytest.raises(TraceError, match="its -journal file cannot be used") as caught:
        open_trace(half_changed)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Copy both files")


KILLED_WHILE_CREATING = """
import os, pathlib, signal, sys
from flexinspect.trace.file.writer import TraceWriter
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
TraceWriter.create(sys.argv[1], {})
"""


def test_a_process_killed_while_it_creates_a_trace_leaves_no_part_of_one(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = Popen([sys.executable, "-c", KILLED_WHILE_CREATING, path], env=environ)
    assert child.wait() == -signal.SIGKILL
    assert path.read_bytes() == b""
    with pytest.raises(TraceError, match="is empty"):
        open_trace(path)
    TraceWriter.create(path, {}, overwrite=True).close("finished")
    assert [each.name for each in tmp_path.iterdir()] == ["run.flextrace"]
