"""Write a trace: one transaction per step, so that the file is readable at every moment.

`synchronous=NORMAL` on a WAL never waits for the disk within a step. A killed process loses no step
for which `write_step` has returned, because the kernel holds the pages; a power failure may lose
the last steps but never the file. Also here: what is added to a trace after its recording.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from flexinspect.core.errors import TracePlaceError, TraceWriteError
from flexinspect.records import step as step_records
from flexinspect.records.finding import Finding, Repeat
from flexinspect.records.prompt import Segment
from flexinspect.trace import codec, schema
from flexinspect.trace.codec import Statement, bindable
from flexinspect.trace.file import connections, location
from flexinspect.trace.file.earlier_versions import check_tables
from flexinspect.trace.file.salvage import is_repaired_copy

WAL_TIDY_BYTES = 4 << 20  # size of the WAL above which it is folded in between two generations

WAL_LIMIT_PAGES = 16_384
"""Pages (64 MiB) of WAL above which a commit folds them into the file, even within a generation."""

READER_WAIT_S = 1.5  # how long closing waits for readers to release the WAL
CLOSE_BUSY_MS = (
    200  # how long each attempt of it waits for another program that has locked the file
)
WRITE_BUSY_S = 10.0  # how long a commit waits for another program that has locked the file
APPEND_BUSY_S = 5.0  # how long an addition waits for another program that writes at the same time
_UNBINDABLE = (sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, UnicodeEncodeError)

# Numpy scalars are bound as blobs, which a STRICT column refuses as a constraint.
_KEY_CONFLICTS = ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE")


class TraceWriter:
    """Records one process into one file. Any thread may call it; calls are serialized.

    `path` is where the finished trace will be, `recording_path` where it is until `close` (another
    path only for a target on a network file system). `note` is a sentence for the user about that,
    or about files that `close` had to leave. `failed` is whether recording had to stop.
    """

    def __init__(self, path: Path, recording_path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self.recording_path = recording_path
        self.note: str | None = None
        self.failed = False
        self._reason = ""
        self._db = db
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._file_id = location.file_id(recording_path)
        self._known_masks: set[str] = set()
        self._converts_values = False
        self._closed = False

    @classmethod
    def create(
        cls, path: str | Path, run: Mapping[str, Any], *, overwrite: bool = False
    ) -> TraceWriter:
        """Make a new trace at `path` with the manifest `run`; the state becomes "recording".

        Raises `TraceWriteError` when the path cannot be used or, without `overwrite`, exists.
        """
        target = Path(path).absolute()
        with location.creation_lock(target.parent):
            return cls._create(target, run, overwrite=overwrite)

    @classmethod
    def _create(cls, target: Path, run: Mapping[str, Any], *, overwrite: bool) -> TraceWriter:
        location.create_trace_file(target, overwrite=overwrite)
        network = location.network_file_system(target.parent)
        here = target
        if network is not None:
            location.remove_placeholder(target)
            here = location.temporary_trace_path(target)
            location.create_trace_file(here, overwrite=False)
        writer = cls(target, here, create_trace(here, {**run, "state": "recording"}))
        if network is not None:
            writer.note = (
                f"{target.parent} is on a network file system ({network}): recording to {here}, "
                "and moving the trace when it is finished."
            )
        return writer

    def update_run(self, **facts: Any) -> None:
        """Set facts of the manifest. Raises `TraceWriteError`."""
        self._write(codec.encode_run_facts(facts), "the manifest")

    def write_event(self, event: step_records.EventRecord) -> None:
        """Record an event that is not part of a step's record. Raises `TraceWriteError`."""
        self._write(codec.encode_events((event,)), f"an event ({event.kind})")

    def write_output(self, records: Iterable[step_records.OutputRecord]) -> None:
        """Record what the program printed, in order. Raises `TraceWriteError`."""
        self._write(codec.encode_output(records), "the program's output")

    def write_findings(self, findings: Iterable[Finding]) -> None:
        """Record findings that are not part of a step's record. Raises `TraceWriteError`."""
        self._write(codec.encode_findings(findings), "findings")

    def explain_finding(self, finding: Finding) -> None:
        """Set the severity, sentence and evidence of a stored finding. Raises `TraceWriteError`."""
        self._write(codec.encode_explanation(finding), "the explanation of a finding")

    def write_gradients(self, record: step_records.GradientRecord) -> None:
        """Record the gradients of one token in one transaction. Raises `TraceWriteError`."""
        self._write(codec.encode_gradients(record), f"the gradients of step {record.step}")

    def write_repeats(self, place: tuple[int, int, int], records: Iterable[Repeat]) -> None:
        """Count repeated findings at (generation, branch, step). Raises `TraceWriteError`."""
        self._write(codec.encode_repeats(records, place), "repeated findings")

    def begin_generation(self, record: step_records.GenerationRecord) -> None:
        """Record the prompt of a new generation. Raises `TraceWriteError`."""
        with self._lock:
            with suppress(sqlite3.Error):  # between generations no step waits for it
                if (
                    not self._is_stopped()
                    and connections.wal_bytes(self.recording_path) > WAL_TIDY_BYTES
                ):
                    self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._commit(codec.encode_generation_start(record), f"generation {record.generation}")

    def begin_branch(
        self,
        generation: int,
        branch: int,
        parent: int,
        fork_step: int,
        change: Mapping[str, Any] | None = None,
        segments: Sequence[Segment] = (),
    ) -> None:
        """Record a fork of `parent`, whose first own step is `fork_step`.

        A branch holds only its own steps and tokens; earlier ones are its parent's. `change` says
        how it differs, see `BranchRecord`. Raises `TraceWriteError`.
        """
        place = (generation, branch, parent, fork_step)
        statements = codec.encode_branch_start(*place, time.time(), change, segments)
        self._write(statements, f"branch {branch} of generation {generation}")

    def write_step(self, record: step_records.StepRecord) -> None:
        """Record one step in one transaction.

        Raises `TraceWriteError` once when recording has to stop (see `failed`); later calls do
        nothing. Also raises it for a record that cannot be stored (a step written twice, an array
        of objects), after which recording may continue.
        """
        with self._lock:
            self._write_batch([record])

    def write_steps(self, records: Sequence[step_records.StepRecord]) -> None:
        """Record several waiting steps in one transaction.

        Committing is more than half of the cost of a step, and consecutive steps dirty the same
        pages. Raises as `write_step` does. If a record cannot be stored, the others are stored all
        the same: the error's `stored` has their indices. The error is that of the first refused
        record, or the one that ended the recording; `others` has the messages of further ones.
        """
        with self._lock:
            try:
                self._write_batch(records)
                return
            except TraceWriteError:
                if self.failed or len(records) == 1:
                    raise
        self._write_one_by_one(records)

    def _write_one_by_one(self, records: Sequence[step_records.StepRecord]) -> None:
        refused: list[TraceWriteError] = []
        stored: list[int] = []
        for number, record in enumerate(records):
            try:
                self.write_step(record)
                stored.append(number)
            except TraceWriteError as error:
                refused.append(error)
                if self.failed:
                    break
        if refused:
            raised = refused.pop(-1 if self.failed else 0)
            raised.stored = tuple(stored)
            raised.others = tuple(error.message for error in refused)
            raise raised

    def _write_batch(self, records: Sequence[step_records.StepRecord]) -> None:
        if self._is_stopped():
            return
        what = f"step {records[0].step} of generation {records[0].generation}"
        known = self._known_masks
        if len(records) > 1:
            what = f"steps {records[0].step} to {records[-1].step}"
            known = set(known)  # a batch that is refused leaves no masks behind
        statements: list[Statement] = []
        for record in records:
            statements += codec.encode_step(record, known)
            if known is not self._known_masks:
                known.update(mask.fingerprint for mask in record.masks)
        self._commit(statements, what)
        self._known_masks.update(mask.fingerprint for each in records for mask in each.masks)

    def end_generation(self, record: step_records.GenerationEnd) -> None:
        """Record how a branch ended, with its final segments. Raises `TraceWriteError`."""
        what = f"the end of generation {record.generation}"
        self._write(codec.encode_generation_end(record), what)

    def close(self, state: str = "finished") -> None:
        """End the trace in `state` (finished, interrupted, failed) and fold the WAL into it.

        Closing again does nothing. Raises `TraceWriteError` only when a trace that was recorded at
        another path cannot be moved to its target.
        """
        with self._lock:
            if not self._is_ending():
                return
            is_ended = self._write_end(state)
        self._finish(is_ended, location.file_id(self.recording_path))

    def _is_ending(self) -> bool:
        """Whether the trace ends now: it was open, and belongs to this process."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _finish(self, is_ended: bool, there: object) -> None:
        """Close the file; `there` is the identity of what was at its path when the trace ended."""
        with self._lock:
            # SQLite deletes the WAL by its name, which may be that of another trace by now.
            is_replaced = there not in (None, self._file_id)
            folded = not is_replaced and self._fold_wal()
            self._db.close()
            if there is not None and location.file_id(self.recording_path) is None:
                return  # deleted by the program since then
            if there != self._file_id:
                self.note = (
                    f"{self.recording_path} was moved, deleted or replaced while it was recorded: "
                    "the recording is where it was moved to, or lost."
                )
                return
            self._move_to_target(folded)
            if not is_ended and self.note is None:
                self.note = f"The end of the recording could not be written to {self.path}."

    def _write_end(self, state: str) -> bool:
        """Write how the recording ended; once again if memory failed, as nothing comes after it."""
        facts: dict[str, Any] = {"ended_at": time.time()}
        if self.failed:
            state, facts["reason"] = "failed", self._reason
        statements = codec.encode_trace_end(state, facts)
        if self.failed:  # then it has waited for the other program already
            with suppress(sqlite3.Error, MemoryError):
                self._db.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
        for _ in range(2):
            try:
                self._transaction(statements)
                return True
            except sqlite3.Error:
                return False
            except MemoryError:
                continue
        return False

    def discard(self) -> None:
        """Remove the trace after it was closed, together with a WAL that could not be folded in."""
        for place in {self.path, self.recording_path}:
            is_replaced = location.file_id(place) not in (None, self._file_id)
            if place != self.recording_path or not is_replaced:
                location.delete_trace(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("interrupted" if interrupted else "failed" if kind else "finished")

    def _is_stopped(self) -> bool:
        # A forked child shares the connection but not its locks: it must never write.
        return self.failed or self._closed or os.getpid() != self._pid

    def _write(self, statements: Sequence[Statement], what: str) -> None:
        with self._lock:
            self._commit(statements, what)

    def _commit(self, statements: Sequence[Statement], what: str) -> None:
        """Run the statements in one transaction, unless recording has stopped."""
        if self._is_stopped():
            return
        try:
            self._bind_and_run(statements)
        except (sqlite3.IntegrityError, *_UNBINDABLE) as error:
            hint = "The recording itself continues."
            raise TraceWriteError(f"The trace refuses {what}: {error}.", hint=hint) from error
        except (sqlite3.Error, MemoryError) as error:
            self.failed = True
            reason, remedy = write_problem(error)
            self._reason = f"Recording to {self.recording_path} stopped at {what}: {reason}."
            kept = "Everything recorded so far stays readable; the generation itself continues."
            raise TraceWriteError(self._reason, hint=f"{kept} {remedy}".rstrip()) from error

    def _bind_and_run(self, statements: Sequence[Statement]) -> None:
        if not self._converts_values:
            try:
                self._transaction(statements)
                return
            except (sqlite3.IntegrityError, *_UNBINDABLE) as error:
                if getattr(error, "sqlite_errorname", "") in _KEY_CONFLICTS:
                    raise
                self._converts_values = True  # such values usually come again
        self._transaction([(sql, list(map(bindable, params))) for sql, params in statements])

    def _transaction(self, statements: Sequence[Statement]) -> None:
        with connections.transaction(self._db):
            connections.execute_all(self._db, statements)

    def _fold_wal(self) -> bool:
        """Fold the WAL into the file; return False when a reader or the disk prevents it."""
        with suppress(sqlite3.Error):
            self._db.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
        until = time.monotonic() + READER_WAIT_S
        while True:
            with suppress(sqlite3.Error, MemoryError):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self._db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete":
                    return True
            if self.failed or time.monotonic() > until:
                return False
            time.sleep(0.02)

    def _move_to_target(self, folded: bool) -> None:
        if self.recording_path != self.path and folded:
            location.move_to_target(self.recording_path, self.path)
            self.note = f"The trace was recorded on a local disk and moved to {self.path}."
        elif not folded:
            self.note = (
                f"Another program or the disk prevented folding the -wal file of "
                f"{self.recording_path} into it: as long as there is one, keep the two together."
            )


def create_trace(path: Path, run: Mapping[str, Any]) -> sqlite3.Connection:
    """Open the empty file `path` as a trace with the manifest `run`.

    The whole trace takes the place of the empty file at once, so a process that is killed here
    leaves no file that is only partly a trace. Raises `TraceWriteError`, with the file removed,
    when that fails.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        what = f"This Python has SQLite {sqlite3.sqlite_version}; a trace needs 3.37 or newer."
        raise TraceWriteError(what, hint="Use a Python of 2022 or later.")
    db = None
    part = path.with_name(path.name + location.PART_SUFFIX)
    try:
        location.write_private(part, _empty_trace(run))
        part.replace(path)
        db = sqlite3.connect(
            f"{path.as_uri()}?mode=rw",
            uri=True,
            timeout=WRITE_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_LIMIT_PAGES}")
    except (sqlite3.Error, OSError, MemoryError) as error:
        if db is not None:
            db.close()
        with suppress(OSError):
            path.unlink()
            part.unlink(missing_ok=True)
        reason, remedy = write_problem(error)  # nothing has run yet
        what = f"The trace {path} cannot be created: {reason}."
        raise TracePlaceError(what, hint=remedy or None) from error
    return db


def _empty_trace(run: Mapping[str, Any]) -> bytes:
    """Return the bytes of a trace that holds its manifest alone."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.deserialize(_empty_tables())
        with connections.transaction(db):
            connections.execute_all(db, codec.encode_run_facts(run))
        return db.serialize()


@cache
def _empty_tables() -> bytes:
    """Return the bytes of a trace without rows; making 20 tables takes most of the time."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        with connections.transaction(db):
            for sql in schema.create_statements():
                db.execute(sql)
        return db.serialize()


NO_MEMORY = "there is no memory left"
_PROBLEMS = (
    ("SQLITE_FULL", "the disk is full", "Free some space, or choose another disk with --out."),
    (("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"), "it is read-only", ""),
    (
        ("SQLITE_BUSY", "SQLITE_LOCKED"),
        "it is locked by another program",
        "Close the program that writes to it.",
    ),
    ("SQLITE_IOERR", "the disk reports an error ({})", "Check the disk and the space left on it."),
)
"""Errors of SQLite by the beginning of their names: the reason, and what the user can do."""


_SQLITE_NAMES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "SQLITE_FULL"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "SQLITE_READONLY"),
    errno.EIO: "SQLITE_IOERR",
}
"""The errors of SQLite that mean the same as an error of the operating system."""


def write_problem(error: sqlite3.Error | OSError | MemoryError) -> tuple[str, str]:
    """Return the reason, and what the user can do about it (empty when unknown)."""
    if isinstance(error, MemoryError):
        return NO_MEMORY, ""
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, OSError):
        name = _SQLITE_NAMES.get(error.errno or 0, "")
    for names, reason, remedy in _PROBLEMS:
        if name.startswith(names):
            return reason.format(error), remedy
    return connections.printable_error(error), ""


class RuleReview(Struct, frozen=True):
    """The result of a rule that ran offline on a generation; `at` in seconds since the epoch."""

    rule: str
    generation: int
    findings: tuple[Finding, ...]
    events: tuple[step_records.EventRecord, ...]
    at: float
    wall_ms: float


def append_reviews(path: Path, reviews: Sequence[RuleReview]) -> None:
    """Write reviews with their findings and events, in one transaction.

    A review that another program has written meanwhile, of the same rule and generation, is kept
    and not written twice. Raises `TraceWriteError`, with nothing written, when the trace is being
    recorded or cannot be written to; `TraceError` when it is not a trace.
    """
    version = connections.check_header(path)
    if version < schema.VERSION:
        raise _append_error(path, f"it has version {version} of the format, which is only read")
    if is_repaired_copy(path):
        raise _append_error(path, "it is a repaired copy of a damaged trace")
    pid = location.recording_pid(path)
    if pid is not None:
        raise _append_error(path, f"process {pid} is recording it")
    if not os.access(path, os.W_OK):
        raise _append_error(path, "it is read-only")
    try:
        uri, timeout = f"{path.absolute().as_uri()}?mode=rw", APPEND_BUSY_S
        db = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)
        with closing(db):
            db.execute("PRAGMA trusted_schema = OFF")
            if db.execute("SELECT 1 FROM sqlite_schema WHERE type = 'trigger'").fetchone():
                raise _append_error(path, "it has triggers, which a trace never has")
            check_tables(db)
            with connections.transaction(db):
                done = set(db.execute("SELECT rule, generation FROM reviews"))
                for key, statements in review_statements(reviews).items():
                    connections.execute_all(db, () if key in done else statements)
    except sqlite3.Error as error:
        raise _append_error(path, write_problem(error)[0]) from error


def review_statements(
    reviews: Iterable[RuleReview],
) -> dict[connections.ReviewKey, list[Statement]]:
    """Return the statements that write these reviews, by rule and generation."""
    insert = schema.insert_sql(schema.REVIEWS, 1)
    return {
        (each.rule, each.generation): [
            *codec.encode_findings(each.findings),
            *codec.encode_events(each.events),
            (insert, (each.rule, each.generation, each.at, each.wall_ms)),
        ]
        for each in reviews
    }


def _append_error(path: Path, why: str) -> TraceWriteError:
    hint = "The findings are complete; they are computed again each time the trace is opened."
    return TraceWriteError(f"The findings are not stored in {path}: {why}.", hint=hint)


def add_run_facts(path: Path, facts: Mapping[str, Any], event: step_records.EventRecord) -> None:
    """Add facts to the manifest of a finished trace, and an event about them.

    Raises `sqlite3.Error`; only for a trace that this program has just made.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db, connections.transaction(db):
        connections.execute_all(db, codec.encode_run_facts(facts) + codec.encode_events((event,)))
