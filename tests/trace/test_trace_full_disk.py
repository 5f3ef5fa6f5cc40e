"""A full disk is reported in one error, and recorded steps stay readable."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.trace_samples import end, generation, same, step

from flexinspect.core.errors import TraceWriteError
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

CHILD = """
import sys
from flexinspect.core.errors import TraceWriteError
from flexinspect.trace.file.writer import TraceWriter
from support.trace_samples import generation, step, end
if sys.argv[2] == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
writer = TraceWriter.create(sys.argv[1], {})
writer.begin_generation(generation())
sentences, written = [], 0
for number in range(400):
    try:
        writer.write_step(step(number))
        written += not writer.failed
    except TraceWriteError as error:
        sentences.append(error.sentence())
writer.end_generation(end())
writer.close()
print(written, len(sentences), writer.failed)
print(sentences[0])
if len(sys.argv) > 3:
    import pathlib, shutil
    for file in pathlib.Path(sys.argv[1]).parent.iterdir():
        shutil.copy(file, sys.argv[3])
"""


def fill(path: Path, n_pages: int) -> tuple[TraceWriter, int, list[TraceWriteError]]:
    """Record until the file may not grow any more; return the writer, steps written, errors."""
    writer = TraceWriter.create(path, {"model": "demo"})
    writer.begin_generation(generation())
    writer._db.execute(f"PRAGMA max_page_count = {n_pages}")
    written, errors = 0, []
    for number in range(200):
        try:
            writer.write_step(step(number))
        except TraceWriteError as error:
            errors.append(error)
        else:
            written += not writer.failed
    return writer, written, errors


def whole(path: Path, n_steps: int) -> None:
    with open_trace(path) as reader:
        assert reader.n_steps(0) == n_steps
        for number in range(n_steps):
            assert same(reader.record(0, number), step(number))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_full_disk_is_reported_once_and_written_steps_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer, written, errors = fill(path, 100)
    assert 0 < written < 200
    assert len(errors) == 1
    assert f"Recording to {path} stopped at step {written} of" in errors[0].message
    assert "the disk is full" in errors[0].message
    assert "stays readable" in (errors[0].hint or "")
    assert writer.failed
    writer.end_generation(end())
    writer.write_event(EventRecord("x", "y", 1.0))
    writer.update_run(a=1)
    writer.close()
    assert list(tmp_path.iterdir()) == [path]
    whole(path, written)
    run = open_trace(path).run()
    assert run["state"] == "failed"
    assert "the disk is full" in run["reason"]


def child(*args: str | Path, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*before, sys.executable, "-c", CHILD, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits here")
def test_a_file_that_cannot_grow_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    done = child(path, "limit")
    assert done.returncode == 0, done.stderr
    counts, sentence, *_ = done.stdout.splitlines()
    written, n_sentences, failed = counts.split()
    assert (n_sentences, failed) == ("1", "True")
    assert "the disk" in sentence
    whole(path, int(written))


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits here")
def test_a_disk_that_is_full_at_the_start_leaves_no_file(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(
            TraceWriteError, match=r"a\.flextrace cannot be created: the disk"
        ) as full:
            TraceWriter.create(tmp_path / "a.flextrace", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "goes on" not in (full.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_a_tiny_file_system_fills_up(tmp_path: Path) -> None:
    """A real full disk, where the kernel lets a user mount one in a user namespace."""
    small, out = tmp_path / "small", tmp_path / "out"
    small.mkdir()
    out.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    mount = f'mount -t tmpfs -o size=1m tmpfs "{small}" && exec "$@"'
    inside = ("unshare", "-rm", "sh", "-c", mount, "sh")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name spaces of one's own here")
    done = child(small / "a.flextrace", "mount", out, before=inside)
    assert done.returncode == 0, done.stderr
    counts, sentence, *_ = done.stdout.splitlines()
    written, n_sentences, failed = counts.split()
    assert (n_sentences, failed) == ("1", "True")
    assert "the disk" in sentence
    whole(out / "a.flextrace", int(written))


def test_a_file_that_becomes_read_only_is_reported(tmp_path: Path) -> None:
    writer = TraceWriter.create(tmp_path / "a.flextrace", {})
    writer._db.execute("PRAGMA query_only = ON")
    with pytest.raises(TraceWriteError, match="it is read-only"):
        writer.write_step(step(0))
    writer.write_step(step(0))
    writer.close()
    assert open_trace(tmp_path / "a.flextrace").n_steps(0) == 0


def test_a_file_locked_by_another_program_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    writer._db.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TraceWriteError, match="it is locked by another program"):
            writer.write_step(step(0))
    writer.close()
    assert open_trace(path).state == "failed"


def test_an_end_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    writer = TraceWriter.create(tmp_path / "a.flextrace", {})
    writer._db.execute("PRAGMA query_only = ON")
    writer.close()
    assert writer.note is not None
    assert "end" in writer.note or "folding" in writer.note
    assert open_trace(tmp_path / "a.flextrace").state == "recording"
