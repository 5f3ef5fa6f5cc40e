"""Reading while another thread or process writes, and from read-only folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.trace_samples import end, generation, same, small_step, step, write

from flexinspect.core.errors import TraceError
from flexinspect.trace.file.connections import TraceConnections, check_header, in_wal_mode
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def wait_until(true: object) -> None:
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.005)


def test_a_step_is_seen_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer, open_trace(path) as reader:
        assert not reader.changed()
        writer.begin_generation(generation())
        for number in range(5):
            writer.write_step(step(number))
            assert reader.changed()
            assert not reader.changed()
            assert reader.last_step(0) == number
            assert same(reader.record(0, number), step(number))


def test_a_reader_in_another_thread_never_sees_half_a_step(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    stop = threading.Event()
    seen: list[int] = []
    wrong: list[object] = []

    def look(reader: TraceReader) -> None:
        while not stop.is_set():
            last = reader.last_step(0)
            if last is not None:
                seen.append(last)
                record = reader.record(0, last)
                if not same(record, step(last)):
                    wrong.append(record)

    with TraceWriter.create(path, {}) as writer, open_trace(path) as reader:
        writer.begin_generation(generation())
        threads = [threading.Thread(target=look, args=(reader,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(200):
            writer.write_step(step(number))
        wait_until(lambda: seen and seen[-1] == 199)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert seen[-1] == 199


CHILD = """
import sys, time
from support.trace_samples import generation, end, small_step
from flexinspect.trace.file.writer import TraceWriter
with TraceWriter.create(sys.argv[1], {}) as writer:
    writer.begin_generation(generation())
    for number in range(150):
        writer.write_step(small_step(number))
        time.sleep(0.002)
    writer.end_generation(end(0, 150))
"""


def test_another_process_is_followed_to_its_end_and_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, path], env=environ)
    wait_until(lambda: path.exists() and path.stat().st_size > 0 and in_wal_mode(path))
    lengths = []
    with open_trace(path) as reader:
        until = time.monotonic() + 30
        while reader.state == "recording" and time.monotonic() < until:
            if reader.changed():
                lengths.append(reader.n_steps(0))
            time.sleep(0.003)
        reader.changed()
        assert child.wait(20) == 0
        assert reader.n_steps(0) == 150
        assert same(reader.record(0, 149), small_step(149))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 5
    assert names(tmp_path) == ["a.flextrace"]
    assert not in_wal_mode(path)


def test_a_polling_reader_lets_the_writer_fold_its_wal(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    reader = open_trace(path)
    writer.begin_generation(generation())
    reader.tokens(0)
    closing = threading.Thread(target=writer.close)
    closing.start()
    while closing.is_alive():
        reader.changed()
        reader.tokens(0)
        time.sleep(0.005)
    assert writer.note is None
    assert names(tmp_path) == ["a.flextrace"]
    assert len(reader.tokens(0)) == 4


def test_a_reader_that_never_releases_the_file_is_reported_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect.trace.file.writer.READER_WAIT_S", 0.05)
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    writer.write_step(step(0))
    reader = open_trace(path)
    with reader.snapshot():
        assert reader.n_steps(0) == 1
        writer.write_step(step(1))
        writer.close()
        assert "keep the two together" in (writer.note or "")
        assert reader.n_steps(0) == 1
    assert reader.n_steps(0) == 2
    reader.close()
    copy = tmp_path / "copies"
    copy.mkdir()
    for name in names(tmp_path):
        if name != "copies":
            shutil.copy(tmp_path / name, copy)
    assert open_trace(copy / "a.flextrace").n_steps(0) == 2


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer, open_trace(path) as reader:
        writer.write_step(step(0))
        with reader.snapshot():
            assert reader.n_steps(0) == 1
            writer.write_step(step(1))
            assert reader.n_steps(0) == 1
        assert reader.n_steps(0) == 2


def test_a_finished_trace_is_read_without_making_files(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(finished, tmp_path / "a.flextrace"))
    with open_trace(path) as reader:
        reader.record(0, 0)
        assert names(tmp_path) == ["a.flextrace"]
        assert not reader.changed()
    assert names(tmp_path) == ["a.flextrace"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a new folder that others may enter; each start of pytest closes its own to them."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


READ = """
import os, sys
from flexinspect.core.errors import TraceError
from flexinspect.trace.reader import open_trace
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    with open_trace(sys.argv[1]) as reader:
        print(reader.n_steps(0), reader.record(0, 1) is not None)
except TraceError as error:
    print(error.message)
"""


def read_as_nobody(path: Path) -> str:
    """Read in a child that cannot write to the folder, even when the tests run as root."""
    for each in path.parent.iterdir():
        each.chmod(0o644)
    path.parent.chmod(0o555)
    try:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", READ, path],
            *(),
            capture_output=True,
            text=True,
            env=environ,
            check=False,
        )
    finally:
        path.parent.chmod(0o755)
    if done.returncode:
        pytest.skip("no other user can run this Python")
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="no users like that here")
def test_a_trace_in_a_read_only_folder_is_read(folder: Path) -> None:
    path = write(folder / "a.flextrace")
    assert read_as_nobody(path) == "2 True"
    assert names(folder) == ["a.flextrace"]


@pytest.mark.skipif(sys.platform == "win32", reason="no users like that here")
def test_a_trace_left_in_wal_mode_is_read_in_a_read_only_folder(folder: Path) -> None:
    path = write(folder / "a.flextrace")
    data = bytearray(path.read_bytes())
    data[18:20] = b"\2\2"
    path.write_bytes(data)
    assert read_as_nobody(path) == "2 True"
    assert names(folder) == ["a.flextrace"]


@pytest.mark.skipif(sys.platform == "win32", reason="no users like that here")
def test_an_unfinished_trace_in_a_read_only_folder_is_read_or_refused(
    tmp_path: Path, folder: Path
) -> None:
    live = tmp_path / "live"
    live.mkdir()
    with TraceWriter.create(live / "a.flextrace", {}) as writer:
        writer.write_step(step(0))
        writer.write_step(step(1))
        for suffix in ("", "-wal"):
            shutil.copy(live / f"a.flextrace{suffix}", folder)
    out = read_as_nobody(folder / "a.flextrace")
    assert "its -wal file cannot be read in this folder" in out or out == "2 True"


def test_connections_of_finished_threads_are_closed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flextrace")
    with open_trace(path) as reader:
        for _ in range(5):
            thread = threading.Thread(target=reader.run)
            thread.start()
            thread.join()
        reader.run()
        wait_until(lambda: len(reader._connections._handles) <= 1)
        assert len(reader._connections._handles) <= 1


def test_a_closed_reader_reopens_when_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flextrace")
    reader = open_trace(path)
    reader.close()
    assert reader.n_steps(0) == 2
    reader.close()
    path.unlink()
    with pytest.raises(TraceError):
        reader.n_steps(0)


def test_many_threads_may_write_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:

        def record(number: int) -> None:
            for one in range(20):
                writer.write_step(small_step(one, number))

        threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with open_trace(path) as reader:
        assert [reader.n_steps(number) for number in range(4)] == [20] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_trace_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.write_step(small_step(0))
        child = os.fork()
        if not child:
            with suppress(BaseException):
                writer.write_step(small_step(5))
                writer.close("failed")
            os._exit(0)
        os.waitpid(child, 0)
        writer.write_step(small_step(1))
        writer.end_generation(end())
    with open_trace(path) as reader:
        assert (reader.state, reader.last_step(0)) == ("finished", 1)


def test_an_empty_wal_that_a_reader_made_while_the_writer_folded_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    reader = TraceReader(path)
    assert reader.state == "recording"
    reader.close()
    writer.close()
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).touch()
    assert reader.state == "finished"
    reader.close()
    assert list(tmp_path.iterdir()) == [path]


def test_the_files_of_a_trace_that_took_the_place_of_another_are_left(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    reader = TraceReader(path)
    assert reader.state == "recording"
    writer.close()
    TraceWriter.create(tmp_path / "b.flextrace", {}).close()
    (tmp_path / "b.flextrace").replace(path)
    index = path.with_name(path.name + "-shm")
    index.touch()
    reader.close()
    assert index.exists()


def test_a_trace_that_its_writer_lengthens_while_it_is_opened_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.write_step(small_step(0))
    whole, path_open = path.read_bytes(), Path.open
    path.write_bytes(whole[:8192])

    def lengthened(self: Path, *args: Any) -> Any:
        os.truncate(path, len(whole))
        with path_open(path, "r+b") as file:
            file.write(whole)
        return path_open(self, *args)

    monkeypatch.setattr(Path, "open", lengthened)
    assert check_header(path) > 0


def test_a_trace_that_its_writer_removes_while_it_is_read_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}):
        connections = TraceConnections(path)
        path.unlink()
        connections.release()
        with pytest.raises(TraceError, match="cannot be opened"):
            connections.query("SELECT 1")
        connections.close()
