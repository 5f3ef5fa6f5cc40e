"""Where a trace is recorded, and by which process.

Checks of the path, a local folder for network file systems, and the end of a trace whose process
has died.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from operator import itemgetter
from pathlib import Path

from flexinspect.core.environment import SHARE_VARIABLE, is_recorder_alive
from flexinspect.core.errors import TracePlaceError
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.trace import codec
from flexinspect.trace.file import connections
from flexinspect.trace.file.side_files import LAST_CALL_SUFFIX, STOP_SUFFIX

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "afpfs", "ncpfs"),
        *("9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "davfs", "webdav", "vboxsf"),
        *("fuse.sshfs", "fuse.ceph", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse"),
        *("fuse.vmhgfs-fuse", "fuse.davfs2", "fuse.beegfs", "fuse.juicefs", "fuse.curlftpfs"),
    }
)
"""File systems on which the shared memory or the locks of WAL cannot be relied on."""

PART_SUFFIX = ".part"  # of a trace that has not taken its place yet
COMPANION_SUFFIXES = ("-wal", "-shm", "-journal", PART_SUFFIX, LAST_CALL_SUFFIX, STOP_SUFFIX)
"""Suffixes of files that SQLite and a recording process put beside a trace; they belong to it."""


MAX_LOCK_S = 5.0
"""How long creation waits for another process that creates a trace in the same folder."""


def network_file_system(folder: Path) -> str | None:
    """Return the name of the network file system that holds `folder`, or None for a local disk."""
    if folder.drive.startswith("\\\\"):
        return "network share"
    folder = folder.resolve()
    mounts = [(len(at.parts), kind) for at, kind in _mounts() if folder.is_relative_to(at)]
    kind = max(reversed(mounts), default=(0, ""), key=itemgetter(0))[1].lower()
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def _mounts() -> list[tuple[Path, str]]:
    if sys.platform == "linux":
        with suppress(OSError):
            lines = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape").splitlines()
            fields = [line.split() for line in lines]
            return [(Path(_unescape(field[1])), field[2]) for field in fields if len(field) > 2]
    import psutil  # type: ignore[import-untyped, unused-ignore]

    return [(Path(disk.mountpoint), disk.fstype) for disk in psutil.disk_partitions(all=True)]


def _unescape(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


def write_private(file: Path, data: bytes) -> None:
    """Write a file that only this user can read, unless `SHARE_VARIABLE` says otherwise.

    A trace holds prompts. SQLite gives the files beside it the same permissions.
    """
    mode = 0o666 if os.environ.get(SHARE_VARIABLE) == "1" else 0o600
    with open(file, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as out:
        out.write(data)


def create_trace_file(path: Path, *, overwrite: bool) -> None:
    """Create the empty file `path`, or raise `TracePlaceError` with the reason.

    With `overwrite` an older trace there is replaced, but never a file that is not a trace.
    """
    try:
        if path.is_dir():
            what = f"The trace cannot be written to {path}: that is a folder."
            raise TracePlaceError(what, hint="Name a file in it, for instance run.flextrace.")
        if overwrite and path.exists():
            _remove_old_trace(path)
        path.open("xb").close()
        _remove_companions(path)
    except OSError as error:
        raise _path_error(path, error) from None


@contextmanager
def creation_lock(folder: Path) -> Iterator[None]:
    """While entered, no other process creates a trace in `folder`.

    Without it, of two processes that overwrite one trace at the same moment each finds no recording
    process yet, and the later one replaces what the earlier one records. The lock is on the folder,
    so that it leaves no file. Where there is none, or it is held for long, creation goes on.
    """
    opened = None
    with suppress(OSError, ImportError):
        import fcntl

        opened = os.open(folder, os.O_RDONLY)
        until = time.monotonic() + MAX_LOCK_S
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.005)
    try:
        yield
    finally:
        if opened is not None:
            os.close(opened)


def file_id(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of the same name, None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_trace_target(path: Path, *, overwrite: bool) -> None:
    """Raise `TracePlaceError` if a finished trace cannot be moved to `path`; create nothing.

    With `overwrite` an older trace may be there, but never a file that is not a trace.
    """
    if path.is_dir():
        what = f"The trace cannot be written to {path}: that is a folder."
        raise TracePlaceError(what, hint="Name a file in it, for instance run.flextrace.")
    if not path.exists():
        return
    if not overwrite:
        raise _path_error(path, FileExistsError())
    try:
        _check_old_trace(path)
    except OSError as error:
        raise _path_error(path, error) from None


def _remove_old_trace(path: Path) -> None:
    _check_old_trace(path)
    path.unlink()


def _check_old_trace(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode) or not _is_trace_file(path):
        hint = "Choose another name, or remove the file yourself."
        raise TracePlaceError(f"{path} is not a trace, so it is not overwritten.", hint=hint)
    pid = recording_pid(path)
    if pid is not None and pid != os.getpid():
        what = f"{path} is being recorded by process {pid}, so it is not overwritten."
        raise TracePlaceError(what, hint="Choose another name, or stop that run first.")
    path.open("r+b").close()  # fails for a read-only file, which must not be replaced either


def delete_trace(path: Path) -> None:
    """Remove a trace that no process writes any more, with the files beside it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        _remove_companions(path)


def remove_placeholder(path: Path) -> None:
    """Remove the empty file of `create_trace_file`. Raises `TracePlaceError`."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _path_error(path, error) from None


def _remove_companions(path: Path) -> None:
    for companion in COMPANION_SUFFIXES:
        path.with_name(path.name + companion).unlink(missing_ok=True)


def _is_trace_file(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(connections.HEADER_BYTES)
    return not head or connections.is_trace_header(head)


def _path_error(path: Path, error: OSError) -> TracePlaceError:
    match error:
        case FileExistsError():
            reason, hint = "the file exists already", "Choose another name, or ask to overwrite it."
        case FileNotFoundError() | NotADirectoryError() if not path.parent.is_dir():
            reason = f"there is no folder {path.parent}"
            hint = "Create the folder first, or choose another one."
        case PermissionError() | FileNotFoundError():  # the latter in /proc
            reason, hint = "permission denied", "Choose a writable folder."
        case OSError(errno=errno.EROFS):
            reason, hint = "the file system is read-only", "Choose a writable folder."
        case _:
            reason = error.strerror or str(error)
            hint = "Choose another folder, on a disk with space left."
    return TracePlaceError(f"The trace cannot be written to {path}: {reason}.", hint=hint)


def temporary_trace_path(path: Path) -> Path:
    """Return a path of the same name in a new local temporary folder."""
    try:
        return Path(tempfile.mkdtemp(prefix="flexinspect-")) / path.name
    except OSError as error:
        raise _path_error(Path(tempfile.gettempdir()) / path.name, error) from None


def move_to_target(recorded: Path, path: Path) -> None:
    """Move a finished trace from the local temporary folder to its target.

    Raises `TracePlaceError`, which names where the trace is, when that fails.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        shutil.copyfile(recorded, part)
        with suppress(OSError):  # a file system without permissions
            part.chmod(stat.S_IMODE(recorded.stat().st_mode))
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        what = f"The finished trace could not be moved to {path}: {error.strerror or error}."
        hint = f"It is complete at {recorded}; move it from there."
        raise TracePlaceError(what, hint=hint) from None
    with suppress(OSError):
        shutil.rmtree(recorded.parent)


def recording_pid(path: Path) -> int | None:
    """Return the id of the process that is recording a trace now, None when there is none."""
    try:
        with closing(connections.connect(path.absolute())) as db:
            rows = db.execute("SELECT key, value FROM run").fetchall()
        run = {key: codec.from_json(value) for key, value in rows}
    except (sqlite3.Error, ValueError, OSError):
        return None
    pid = run.get("pid")
    live = run.get("state") == "recording" and isinstance(pid, int) and is_recorder_alive(run)
    return pid if live else None


_LAST_STEP_SQL = (
    "SELECT generation, step FROM steps ORDER BY generation DESC, branch DESC, step DESC LIMIT 1"
)
CLOSE_BUSY_MS = 500  # how long closing the trace of a dead process waits for another program
ExplainEnd = Callable[[int | None, int | None], tuple[EventRecord, Sequence[Finding]] | None]
"""Explains how a process ended, given the generation and step that were written last."""


def close_dead_trace(path: Path, reason: str, pid: int, explain: ExplainEnd | None = None) -> bool:
    """Mark the trace of a dead process as failed, and fold in its WAL.

    Only for a trace whose process `pid` is known to be dead. A trace that another process has put
    in its place, or that has ended, is left alone. The event and findings that `explain` returns
    are written with it. Returns whether this succeeded; if not, the trace is as readable as before.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
        with connections.transaction(db):
            known = dict(db.execute("SELECT key, value FROM run WHERE key IN ('pid', 'state')"))
            if known != {"pid": codec.to_json(pid), "state": codec.to_json("recording")}:
                return False
            last_step = db.execute(_LAST_STEP_SQL).fetchone() or (None, None)
            event, findings = (explain(*last_step) if explain else None) or (None, ())
            facts = {"ended_at": time.time(), "reason": reason}
            ends = codec.encode_events([event] if event else []) + codec.encode_findings(findings)
            connections.execute_all(db, ends + codec.encode_trace_end("failed", facts))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete")
    return False
