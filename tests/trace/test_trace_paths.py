"""Where a trace can be created, why not elsewhere, and recording for network file systems."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.trace_samples import generation, small_step, write

from flexinspect.core.errors import TraceWriteError
from flexinspect.trace.file import connections, location
from flexinspect.trace.file.location import close_dead_trace
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace


def assert_refused(path: Path, sentence: str, *, overwrite: bool = False) -> None:
    with pytest.raises(TraceWriteError, match=sentence) as caught:
        TraceWriter.create(path, {}, overwrite=overwrite)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_an_existing_trace_is_not_overwritten_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flextrace")
    before = path.read_bytes()
    assert_refused(path, "the file exists already")
    assert path.read_bytes() == before


def test_an_existing_trace_is_replaced_with_overwrite(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flextrace")
    path.with_name("a.flextrace-wal").write_bytes(b"left by something that was killed")
    with TraceWriter.create(path, {"model": "new"}, overwrite=True):
        pass
    with open_trace(path) as reader:
        assert reader.run()["model"] == "new"
        assert reader.generations() == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_a_trace_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"years of work")
    assert_refused(path, "is not a trace, so it is not overwritten", overwrite=True)
    assert path.read_bytes() == b"years of work"


def test_an_empty_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    path.touch()
    TraceWriter.create(path, {}, overwrite=True).close()
    assert open_trace(path).state == "finished"


def test_a_missing_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "no" / "a.flextrace", "there is no folder")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    assert_refused(tmp_path, "that is a folder")
    assert_refused(tmp_path, "that is a folder", overwrite=True)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(tmp_path / "file" / "a.flextrace", "there is no folder")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_folder_that_takes_no_files_is_not_reported_as_missing() -> None:
    assert_refused(Path("/proc/a.flextrace"), "permission denied")


def test_a_file_system_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(Path, "open", Mock(side_effect=refused))
    assert_refused(tmp_path / "a.flextrace", "the file system is read-only")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    assert_refused(tmp_path / ("x" * 300), "cannot be written to")


CREATE = """
import os, sys
from flexinspect.core.errors import TraceWriteError
from flexinspect.trace.file.writer import TraceWriter
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    TraceWriter.create(sys.argv[1], {}, overwrite=True).close()
except TraceWriteError as error:
    print(error.message)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no users like that here")
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_or_file_without_the_right_to_write(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "a.flextrace"
    if exists:
        write(path).chmod(0o444)
    folder.chmod(0o555)
    for outer in (tmp_path, *list(tmp_path.parents)[:2]):
        outer.chmod(outer.stat().st_mode | 0o055)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CREATE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    folder.chmod(0o755)
    if done.returncode:
        pytest.skip("no other user can run this Python")
    assert "permission denied" in done.stdout


@pytest.mark.parametrize("name", ["a b?c#d%20.flextrace", ":memory:", "日本 🗼.flextrace", "-x"])
def test_unusual_file_names_work(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert path.is_file()
    assert open_trace(path).n_steps(0) == 2


def test_a_relative_name_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = TraceWriter.create("a.flextrace", {})
    assert writer.path == writer.recording_path == tmp_path / "a.flextrace"
    assert writer.note is None
    writer.close()


def test_closing_twice_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    writer.begin_generation(generation())
    writer.close("interrupted")
    writer.close("finished")
    writer.write_step(small_step(0))
    with open_trace(path) as reader:
        assert (reader.state, reader.generation(0).state) == ("interrupted", "interrupted")
        assert reader.n_steps(0) == 0


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_leaving_by_an_exception_is_recorded(
    tmp_path: Path, error: type[BaseException], state: str
) -> None:
    path = tmp_path / "a.flextrace"
    with pytest.raises(error), TraceWriter.create(path, {}):
        raise error
    assert open_trace(path).state == state
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_in_wal_mode_while_recording_and_plain_after(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        writer.write_step(small_step(0))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is reported to be on NFS, and a local temporary folder to record to."""
    target, local = tmp_path / "target", tmp_path / "local"
    target.mkdir()
    local.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(local))
    monkeypatch.setattr(location, "network_file_system", lambda folder: "nfs4")
    return target


def test_a_network_file_system_is_recorded_to_a_local_disk_and_moved(on_nfs: Path) -> None:
    path = on_nfs / "a.flextrace"
    writer = TraceWriter.create(path, {})
    assert writer.path == path
    assert writer.recording_path.parent.parent == on_nfs.parent / "local"
    assert "network file system (nfs4)" in (writer.note or "")
    assert list(on_nfs.iterdir()) == []
    writer.write_step(small_step(0))
    with open_trace(writer.recording_path) as reader:
        assert reader.n_steps(0) == 1
    writer.close()
    assert list(on_nfs.iterdir()) == [path]
    assert list((on_nfs.parent / "local").iterdir()) == []
    assert "moved to" in (writer.note or "")
    assert open_trace(path).n_steps(0) == 1


def test_a_trace_that_cannot_be_moved_stays_complete_at_its_local_path(on_nfs: Path) -> None:
    writer = TraceWriter.create(on_nfs / "a.flextrace", {})
    writer.write_step(small_step(0))
    on_nfs.rmdir()
    with pytest.raises(TraceWriteError, match="could not be moved") as caught:
        writer.close()
    assert str(writer.recording_path) in (caught.value.hint or "")
    assert open_trace(writer.recording_path).n_steps(0) == 1


def test_a_network_folder_that_lets_nothing_be_removed_is_refused(
    on_nfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unlink = on_nfs / "a.flextrace", Path.unlink

    def fail(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise OSError(errno.EROFS, "read-only")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    assert_refused(path, "the file system is read-only")


def test_a_network_target_that_exists_is_refused_at_once(on_nfs: Path) -> None:
    (on_nfs / "a.flextrace").write_bytes(b"")
    assert_refused(on_nfs / "a.flextrace", "the file exists already")


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/ann/runs", "nfs4"),
        ("/home", None),
        ("/home/ann bob", "fuse.sshfs"),
        ("/srv/x/y", "cifs"),
        ("/data/z", None),
    ],
)
def test_the_nearest_mount_decides(
    monkeypatch: pytest.MonkeyPatch, folder: str, kind: str | None
) -> None:
    points = [("/", "ext4"), ("/home/ann", "nfs4"), ("/srv", "CIFS"), ("/home/ann\\040bob", "")]
    mounts = [(Path(location._unescape(point)), name) for point, name in points]
    mounts[-1] = (mounts[-1][0], "fuse.sshfs")
    monkeypatch.setattr(location, "_mounts", lambda: mounts)
    monkeypatch.setattr(Path, "resolve", lambda self: self)
    assert location.network_file_system(Path(folder)) == kind


def test_the_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    assert any(point == Path(tmp_path.anchor) for point, _ in location._mounts())
    assert location.network_file_system(tmp_path) is None or os.environ.get("TMPDIR")


def test_a_discarded_trace_leaves_no_files_even_with_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    reader = open_trace(path)
    with reader.snapshot():
        assert reader.run()["state"] == "recording"
        writer.close("failed")
        assert list(tmp_path.glob("*-wal")), "the reader should have kept the WAL from being folded"
        writer.discard()
    reader.close()
    assert not list(tmp_path.iterdir())


def test_a_trace_that_is_being_recorded_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        writer = TraceWriter.create(path, {"pid": other.pid, "started_at": time.time()})
        assert_refused(path, f"is being recorded by process {other.pid}", overwrite=True)
    finally:
        other.kill()
        other.wait()
    writer.close("failed")
    TraceWriter.create(path, {}, overwrite=True).close()


def test_only_the_trace_of_the_dead_process_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    run = {"pid": 2**30, "started_at": 1.0}
    TraceWriter.create(path, run)._db.close()
    assert not close_dead_trace(path, "not mine", 2**30 + 1)
    assert open_trace(path).state == "recording"
    assert close_dead_trace(path, "it died", 2**30)
    with open_trace(path) as reader:
        assert (reader.state, reader.run()["reason"]) == ("failed", "it died")
    assert not close_dead_trace(path, "again", 2**30)


@pytest.mark.skipif(os.name == "nt", reason="no permissions like that here")
@pytest.mark.parametrize(("share", "mode"), [("", 0o600), ("1", 0o644)])
def test_only_its_user_can_read_a_trace_unless_it_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, mode: int
) -> None:
    monkeypatch.setenv("FLEXINSPECT_SHARE", share)
    before = os.umask(0o022)
    try:
        with TraceWriter.create(tmp_path / "a.flextrace", {}) as writer:
            writer.begin_generation(generation())
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("a.flextrace", "a.flextrace-wal", "a.flextrace-shm"), mode)


def test_a_trace_that_is_moved_while_it_is_recorded_is_whole_and_says_so(tmp_path: Path) -> None:
    path, moved = tmp_path / "a.flextrace", tmp_path / "b.flextrace"
    writer = TraceWriter.create(path, {})
    writer.begin_generation(generation())
    writer.write_step(small_step(0))
    path.rename(moved)
    writer.write_step(small_step(1))
    writer.close()
    assert writer.note is not None
    assert writer.note.startswith(f"{path} was moved, deleted or replaced")
    assert open_trace(moved).n_steps(0) == 2


def test_a_trace_in_the_place_of_a_deleted_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    first = TraceWriter.create(path, {})
    first.begin_generation(generation())
    for file in tmp_path.iterdir():
        file.unlink()
    second = TraceWriter.create(path, {})
    second.begin_generation(generation())
    second.write_step(small_step(0))
    first.close()
    first.discard()
    assert path.with_name("a.flextrace-wal").stat().st_size
    assert open_trace(path).n_steps(0) == 1
    second.close()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_trace_is_not_created_while_another_process_creates_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[float] = []

    def create() -> None:
        TraceWriter.create(tmp_path / "a.flextrace", {}).close()
        done.append(time.monotonic())

    with location.creation_lock(tmp_path):
        other = threading.Thread(target=create)
        other.start()
        time.sleep(0.05)
        assert not done
    other.join()
    assert len(done) == 1
    monkeypatch.setattr(location, "MAX_LOCK_S", 0.05)
    with location.creation_lock(tmp_path):  # a process that is stopped holds it for ever
        TraceWriter.create(tmp_path / "b.flextrace", {}).close()


def test_memory_that_fails_ends_the_recording_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter.create(tmp_path / "a.flextrace", {})
    writer.begin_generation(generation())
    with monkeypatch.context() as patch:
        patch.setattr(connections, "execute_all", Mock(side_effect=MemoryError))
        with pytest.raises(TraceWriteError, match="step 0 of generation 0: there is no memory"):
            writer.write_step(small_step(0))
    writer.close()
    assert open_trace(tmp_path / "a.flextrace").state == "failed"


def test_memory_that_fails_while_a_trace_is_created_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "execute_all", Mock(side_effect=MemoryError))
    with pytest.raises(TraceWriteError, match="cannot be created: there is no memory left"):
        TraceWriter.create(tmp_path / "a.flextrace", {})
    assert list(tmp_path.iterdir()) == []
