"""The connections of a reader: one per thread, opened when needed, read only."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from flexinspect.core.errors import TraceError, TruncatedTraceError
from flexinspect.trace.codec import Statement
from flexinspect.trace.file.earlier_versions import OLDEST_VERSION, compatibility_selects
from flexinspect.trace.schema import APPLICATION_ID, EVENTS, FINDINGS, REVIEWS, VERSION

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

ReviewKey = tuple[str, int]  # a rule and a generation that it has reviewed
Overlay = Mapping[ReviewKey, Sequence[Statement]]
"""By review, the statements that would write it and its findings."""

MAX_QUERY_S = 60.0  # a query of a damaged or hostile file ends after this time
_OPS_PER_CHECK = 1_000_000  # instructions of SQLite (some ms) between two looks at the clock
READ_BUSY_S = 2.0  # how long a query waits for a program that has locked the file exclusively
_NO_OVERLAY: Overlay = {}
HEADER_BYTES = 100  # bytes at the start of the first page: the header of a SQLite file
_SQLITE_MAGIC = b"SQLite format 3\0"
_COPY_HINT = (
    "Copy it again from where it was recorded, with the -wal file beside it if there is one."
)


class _ThreadConnection:
    """The connection of one thread. Use it with `lock` held; an old `epoch` means: reopen it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.db: sqlite3.Connection | None = None
        self.epoch = -1
        self.in_snapshot = False
        self._deadline = [0.0]

    def open(self, path: Path, overlay: Overlay) -> sqlite3.Connection:
        """Connect to a trace; queries run up to the deadline. Raises `sqlite3.Error`."""
        self.db = connect(path, overlay)
        deadline = self._deadline  # not `self`: a cycle would keep the connection open
        self.db.set_progress_handler(lambda: time.monotonic() > deadline[0], _OPS_PER_CHECK)
        return self.db

    def extend_deadline(self) -> None:
        """Let the next query run for `MAX_QUERY_S` seconds."""
        self._deadline[0] = time.monotonic() + MAX_QUERY_S

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
            self.db = None

    __del__ = close


class TraceConnections:
    """All connections to the trace at `path`; usable from any thread.

    Raises `TraceError` when the file is missing, is not a trace, is of another version, or is
    damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._handles: WeakSet[_ThreadConnection] = WeakSet()
        self._guard = threading.Lock()
        self._epoch = 0
        self._poll = _ThreadConnection()
        self._poll_version: object = None
        self._close_after_query = False
        self._wal_file: int | None = None
        """The inode of the file that was seen in WAL mode."""
        self._overlay: Overlay = {}
        self._overlaid_state: object = None
        self._source = path
        self._copy: TemporaryDirectory[str] | None = None
        roll_back(path)
        self.version = check_header(path)
        try:
            self.changed()
        except TraceError:
            if not self._copy_unfinished():
                raise
            self.changed()

    def _copy_unfinished(self) -> bool:
        """Read a copy of an unfinished file, whose folder lets nobody finish it.

        SQLite needs to write beside a file that has a WAL or a rollback journal. Returns whether
        there was one, and the copy was made.
        """
        if not (journal_bytes(self.path) or wal_bytes(self.path)):
            return False
        import shutil
        import tempfile

        self._copy = tempfile.TemporaryDirectory(prefix="flexinspect-")
        self._source = Path(self._copy.name, self.path.name)
        try:
            for suffix in ("", "-journal", "-wal"):
                with suppress(FileNotFoundError):
                    beside = self.path.with_name(self.path.name + suffix)
                    shutil.copyfile(beside, f"{self._source}{suffix}")
        except OSError:
            return False
        roll_back(self._source)
        return True

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a query made in this thread."""
        handle = self._thread_connection()
        with handle.lock, trace_errors(self.path):
            db = self._open_connection(handle)
            try:
                return db.execute(sql, params).fetchall()
            finally:
                if self._close_after_query and not handle.in_snapshot:
                    handle.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """While entered, all queries of this thread see the trace as it is now."""
        handle = self._thread_connection()
        with handle.lock:
            with trace_errors(self.path):
                db = self._open_connection(handle)
                db.execute("BEGIN")
            handle.in_snapshot = True
            try:
                yield
            finally:
                handle.in_snapshot = False
                with suppress(sqlite3.Error):
                    db.execute("COMMIT")

    def changed(self) -> bool:
        """Tell whether anything was committed since the last call; costs a few microseconds."""
        with self._poll.lock, trace_errors(self.path):
            is_new = self._poll.db is None
            version = self._open_connection(self._poll).execute("PRAGMA data_version").fetchone()
            has_changed = not is_new and version != self._poll_version
            self._poll_version = version
            if has_changed and self._overlay and self._is_overlay_stale():
                self._reopen()  # the overlay copied rows that have changed since
            if self._close_after_query:
                self._poll.close()
            return has_changed

    def add_overlay(self, reviews: Overlay) -> None:
        """Add reviews to temporary copies of the tables of findings, events and reviews.

        All connections read these copies from now on.
        """
        self._overlay = {**self._overlay, **reviews}
        self._reopen()

    def remove_overlay(self) -> None:
        """Read the tables of the file itself again."""
        if self._overlay:
            self._overlay = {}
            self._reopen()

    def _is_overlay_stale(self) -> bool:
        """Tell whether rows that the overlay copied have changed since the last call."""
        db = self._open_connection(self._poll)
        findings = db.execute(f"SELECT * FROM main.{FINDINGS.name}").fetchall()
        n_events = db.execute(f"SELECT max(event) FROM main.{EVENTS.name}").fetchone()
        before, self._overlaid_state = self._overlaid_state, (findings, n_events)
        return before != self._overlaid_state

    def _reopen(self) -> None:
        """Make every thread reopen its connection, except the one that polls for changes."""
        with self._guard:
            self._epoch += 1
            self._poll.epoch = self._epoch

    def release(self) -> None:
        """Close all idle connections, so that a writer that ends can fold in its WAL.

        From then on a connection lives for one query, until the file has left WAL mode.
        """
        self._close_after_query = in_wal_mode(self.path)
        self.close()

    def close(self) -> None:
        """Close all connections that are not in use; a later query opens new ones."""
        with self._guard:
            self._epoch += 1
            handles = [*self._handles, self._poll]
        for handle in handles:
            if handle.lock.acquire(blocking=False):
                try:
                    if not handle.in_snapshot:
                        handle.close()
                finally:
                    handle.lock.release()
        if self._wal_file is not None and self._copy is None:
            remove_stray_wal(self.path, self._wal_file)

    def _thread_connection(self) -> _ThreadConnection:
        handle: _ThreadConnection | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = _ThreadConnection()
            with self._guard:
                self._handles.add(handle)
        return handle

    def _open_connection(self, handle: _ThreadConnection) -> sqlite3.Connection:
        handle.extend_deadline()
        if handle.db is not None and (handle.epoch == self._epoch or handle.in_snapshot):
            return handle.db
        handle.close()
        self._close_after_query = self._close_after_query and in_wal_mode(self.path)
        if in_wal_mode(self.path):
            self._wal_file = inode(self.path)
        handle.epoch = self._epoch
        return handle.open(self._source, self._overlay)


def connect(path: Path, overlay: Overlay = _NO_OVERLAY) -> sqlite3.Connection:
    """Open a read-only connection. Raises `sqlite3.Error`.

    `overlay` is written to temporary copies of the tables of findings, events and reviews, which
    hide the stored ones. A review that the file holds replaces that of the overlay.

    A file left in WAL mode cannot be opened in a folder that is not writable; if it has no WAL
    file, it can safely be opened as immutable.
    """
    try:
        return _connect_uri(f"{path.as_uri()}?mode=ro", overlay)
    except sqlite3.OperationalError:
        if not in_wal_mode(path) or wal_bytes(path):
            raise
        return _connect_uri(f"{path.as_uri()}?immutable=1", overlay)


def _connect_uri(uri: str, overlay: Overlay) -> sqlite3.Connection:
    db = sqlite3.connect(
        uri, uri=True, timeout=READ_BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        _apply_overlay(db, overlay)
        # The file may be damaged or hostile: check its cells, and run no code that it contains.
        for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _apply_overlay(db: sqlite3.Connection, overlay: Overlay) -> None:
    """Make temporary tables and views, which unqualified names mean from then on."""
    older = compatibility_selects(db)
    if not overlay and not older:
        return
    db.execute("PRAGMA temp_store = MEMORY")
    for table in (FINDINGS, REVIEWS, EVENTS) if overlay else ():
        whole = older.pop(table.name, f"SELECT * FROM main.{table.name}")
        db.execute(table.create_sql().replace("CREATE TABLE", "CREATE TEMP TABLE", 1))
        db.execute(f"INSERT INTO temp.{table.name} {whole}")
    for name, whole in older.items():
        db.execute(f"CREATE TEMP VIEW {name} AS {whole}")
    done = set(db.execute("SELECT rule, generation FROM temp.reviews")) if overlay else set()
    for key, statements in overlay.items():
        execute_all(db, () if key in done else statements)


def execute_all(db: sqlite3.Connection, statements: Iterable[Statement]) -> None:
    """Execute statements (SQL and parameters) in order."""
    for sql, params in statements:
        db.execute(sql, params)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the body in one transaction, which an exception rolls back."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


def roll_back(path: Path) -> None:
    """Undo what a killed process had begun to change in a finished trace.

    Its rollback journal lies beside the file: https://sqlite.org/lockingv3.html#hot_journals. A
    read-only connection cannot open such a file; a writable one restores it. The journal of a
    process that still writes is left alone. What fails here is reported when the file is opened.
    """
    with suppress(TraceError, sqlite3.Error):
        if journal_bytes(path) and is_trace_header(_read_header(path)[0]):
            uri = f"{path.as_uri()}?mode=rw"
            with closing(sqlite3.connect(uri, uri=True, timeout=READ_BUSY_S)) as db:
                db.execute("SELECT count(*) FROM sqlite_schema").fetchone()


def in_wal_mode(path: Path) -> bool:
    """Tell from the header whether the file is (or was left) in WAL mode; False without a file."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:19] == b"\x02"
    except OSError:  # its writer may remove a trace that holds nothing
        return False


def remove_stray_wal(path: Path, seen: int | None) -> None:
    """Remove the empty WAL file, and its index, of a trace that has left WAL mode.

    SQLite leaves WAL mode in two steps (it deletes the WAL and its index, then rewrites the
    header); a reader that opens the file between them creates both again, and SQLite does not
    remove them. `seen` is the inode that was in WAL mode: a trace never enters that mode again,
    but another one may have taken its place.
    """
    with suppress(OSError):
        if in_wal_mode(path) or inode(path) != seen or wal_bytes(path):
            return
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def inode(path: Path) -> int | None:
    """Return the number of a file in its file system, None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def wal_path(path: Path) -> Path:
    """Return the path of the WAL of a trace."""
    return path.with_name(path.name + "-wal")


def wal_bytes(path: Path) -> int:
    """Return the size of the WAL of a trace, 0 if it has none."""
    try:
        return wal_path(path).stat().st_size
    except OSError:
        return 0


def journal_bytes(path: Path) -> int:
    """Return the size of the rollback journal of a trace, 0 if it has none."""
    try:
        return path.with_name(path.name + "-journal").stat().st_size
    except (OSError, ValueError):
        return 0


def check_header(path: Path) -> int:
    """Return the version of a trace, from its header.

    Raises `TraceError` unless it is the header of a trace of a supported version.
    """
    head, size = _read_header(path)
    what = f"{path} is damaged: it is cut short at {size} bytes."
    cut_short = TruncatedTraceError(what, path, hint=_COPY_HINT)
    if not head:
        raise TraceError(f"{path} is empty.", hint="The recording never started; run it again.")
    hint = "Traces end in .flextrace and are made by 'flexinspect run'."
    if not head.startswith(_SQLITE_MAGIC):
        raise TraceError(f"{path} is not a flexinspect trace (not a SQLite file).", hint=hint)
    if len(head) < HEADER_BYTES:
        raise cut_short
    if not is_trace_header(head):
        raise TraceError(f"{path} is a SQLite file of another program, not a trace.", hint=hint)
    version = int.from_bytes(head[60:64], "big")
    which = f"{path} is a trace of version {version}"
    if version > VERSION:
        hint = "Update it: pip install --upgrade flexinspect."
        raise TraceError(f"{which}; this program reads up to {VERSION}.", hint=hint)
    if version < OLDEST_VERSION:
        hint = "Read it with the release that recorded it, or record it again."
        raise TraceError(f"{which}, which this program no longer reads.", hint=hint)
    # In WAL mode the header may be ahead of the file while a writer folds its WAL into it.
    if head[18] == 1 and size < declared_bytes(head):
        raise cut_short
    return version


def _read_header(path: Path) -> tuple[bytes, int]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise TraceError(f"{path} is a folder, not a trace.", hint="Name a file in it.")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait forever
            raise TraceError(f"{path} is not a regular file.", hint="Name a .flextrace file.")
        with path.open("rb") as file:
            # Then the size: a writer that folds its WAL may lengthen the file before the header.
            return file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        hint = "Check the name; 'ls *.flextrace' lists traces."
        raise TraceError(f"There is no trace at {path}.", hint=hint) from None
    except (OSError, ValueError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        raise TraceError(what, hint="Check its permissions.") from None


def is_trace_header(head: bytes) -> bool:
    """Tell whether the first bytes of a file are those of a trace."""
    return head[68:72] == APPLICATION_ID.to_bytes(4, "big")


def page_bytes(head: bytes) -> int:
    """Return the size of a page that the header of a SQLite file declares."""
    page = int.from_bytes(head[16:18], "big")
    return 65536 if page == 1 else max(page, 512)


def declared_bytes(head: bytes) -> int:
    """Return the size of a SQLite file that its header declares."""
    return int.from_bytes(head[28:32], "big") * page_bytes(head)


@contextmanager
def trace_errors(path: Path) -> Iterator[None]:
    """Raise a `TraceError` for any error of SQLite about the file."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        what, hint = f"{path} is damaged: {printable_error(error)}.", _COPY_HINT
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            what = f"{path} is locked by another program."
            hint = "Close that program and try again."
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")) and wal_bytes(path):
            what = f"{path} was not finished, and its -wal file cannot be read in this folder."
            hint = "Copy both files to a writable folder and open the copy."
        elif name.startswith("SQLITE_IOERR"):
            what = f"{path} cannot be read: the disk reports an error ({error})."
            hint = "Check the disk; the trace itself may be whole."
        elif name == "SQLITE_INTERRUPT":
            what = f"{path} is damaged: a query was stopped after {MAX_QUERY_S:.0f} s."
        elif name == "SQLITE_READONLY_ROLLBACK":
            what = f"{path} was being changed; its -journal file cannot be used in this folder."
            hint = "Copy both files to a writable folder and open the copy."
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            what, hint = f"{path} cannot be opened ({error}).", "Check its permissions."
        raise TraceError(what, hint=hint) from error
    except UnicodeError as error:  # SQLite quoted a part of the file in its message
        what = f"{path} is damaged: its text is not readable."
        raise TraceError(what, hint=_COPY_HINT) from error
    except (OSError, MemoryError, OverflowError) as error:
        raise TraceError(f"{path} cannot be read: {error}.", hint=_COPY_HINT) from error


def printable_error(error: Exception) -> str:
    """Return the message of an error of SQLite, which may quote a damaged file."""
    return "".join(char if char.isprintable() else "?" for char in str(error))
