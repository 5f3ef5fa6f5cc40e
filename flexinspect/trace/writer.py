"""Writing a trace: one transaction per step, readable at every moment, whatever happens to us.

`synchronous=NORMAL` on a WAL never waits for the disk within a step. A killed process loses nothing
that `write_step` has returned from, because the pages are with the kernel; a power failure may lose
the last steps but never the file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flexinspect.errors import TraceWriteError
from flexinspect.findings import Finding, Repeat
from flexinspect.gradientrecords import GradientRecord
from flexinspect.prompts import Segment
from flexinspect.records import (
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    OutputRecord,
    StepRecord,
)
from flexinspect.trace import encode, places
from flexinspect.trace.encode import Statement
from flexinspect.trace.fresh import create_trace, recording_error
from flexinspect.trace.values import bindable

WAL_TIDY_PAGES = 1_024
"""Pages (4 MiB) of WAL worth folding into the file between two generations."""

READER_WAIT_S = 1.5
"""How long closing waits for live readers to let go of the WAL."""

_UNBINDABLE = (sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, UnicodeEncodeError)

# Numpy scalars are bound as blobs, which a STRICT column refuses as a constraint.
_KEY_CONFLICTS = ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE")


class TraceWriter:
    """Records one process into one file. Any thread may call it, one at a time.

    `path` is where the trace will be, `recording_path` where it is until `close` (elsewhere only
    for a target on a network file system), `note` a sentence for the user about that or about what
    `close` had to leave behind, `failed` whether recording had to stop.
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
        places.create_trace_file(target, overwrite=overwrite)
        network = places.network_file_system(target.parent)
        here = target
        if network is not None:
            target.unlink(missing_ok=True)
            here = places.temporary_trace_path(target)
            places.create_trace_file(here, overwrite=False)
        writer = cls(target, here, create_trace(here, {**run, "state": "recording"}))
        if network is not None:
            writer.note = (
                f"{target.parent} is on a network file system ({network}): recording to {here}, "
                "and moving the trace when it is finished."
            )
        return writer

    def update_run(self, **facts: Any) -> None:
        """Set facts of the manifest. Raises `TraceWriteError`."""
        with self._lock:
            self._commit(encode.encode_run_facts(facts), "the manifest")

    def write_event(self, event: EventRecord) -> None:
        """Record something that happened outside of a step. Raises `TraceWriteError`."""
        statements: list[Statement] = []
        encode.encode_events(statements, (event,))
        with self._lock:
            self._commit(statements, f"an event ({event.kind})")

    def write_output(self, records: Iterable[OutputRecord]) -> None:
        """Record what the program printed, in order. Raises `TraceWriteError`."""
        statements: list[Statement] = []
        encode.encode_output(statements, records)
        with self._lock:
            self._commit(statements, "the program's output")

    def write_findings(self, findings: Iterable[Finding]) -> None:
        """Record findings that were made outside of a step. Raises `TraceWriteError`."""
        statements: list[Statement] = []
        encode.encode_findings(statements, findings)
        with self._lock:
            self._commit(statements, "findings")

    def write_gradients(self, record: GradientRecord) -> None:
        """Record the gradients of one token, whole or not at all. Raises `TraceWriteError`."""
        with self._lock:
            self._commit(encode.encode_gradients(record), f"the gradients of step {record.step}")

    def write_repeats(self, place: tuple[int, int, int], records: Iterable[Repeat]) -> None:
        """Count findings again at (generation, branch, step). Raises `TraceWriteError`."""
        statements: list[Statement] = []
        encode.encode_repeats(statements, records, place)
        with self._lock:
            self._commit(statements, "findings that were met again")

    def begin_generation(self, record: GenerationRecord) -> None:
        """Record the prompt of a new generation. Raises `TraceWriteError`."""
        with self._lock:
            self._checkpoint_wal()
            self._commit(encode.encode_generation_start(record), f"generation {record.generation}")

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

        A branch holds only its own steps and tokens; what lies before is its parent's. `change` is
        what made it differ, as `BranchRecord` has it. Raises `TraceWriteError`.
        """
        place = (generation, branch, parent, fork_step)
        statements = encode.encode_branch_start(*place, time.time(), change)
        encode.encode_segments(statements, (generation, branch), segments)
        with self._lock:
            self._commit(statements, f"branch {branch} of generation {generation}")

    def write_step(self, record: StepRecord) -> None:
        """Record one step, in one transaction: afterwards it is in the trace, whole.

        Raises `TraceWriteError` once when recording has to stop (see `failed`), later calls do
        nothing; and for a record that cannot be stored (a step written twice, an array of objects),
        after which recording may go on.
        """
        with self._lock:
            if self._is_stopped():
                return
            what = f"step {record.step} of generation {record.generation}"
            if self._commit(encode.encode_step(record, self._known_masks), what):
                self._known_masks.update(mask.fingerprint for mask in record.masks)

    def write_steps(self, records: Sequence[StepRecord]) -> None:
        """Record steps that waited together, in one transaction: afterwards all of them are there.

        Committing is more than half of what a step costs, and steps in a row dirty the same pages.
        Raises as `write_step` does; a record that cannot be stored takes none of the others along,
        and the error's `stored` says which these are. It is that of the first
        one refused, or of what ended the recording; `others` has what is said of the rest.
        """
        if len(records) == 1:
            self.write_step(records[0])
            return
        with self._lock:
            if self._is_stopped():
                return
            try:
                self._write_batch(records)
                return
            except TraceWriteError:
                if self.failed:
                    raise
        self._write_one_by_one(records)

    def _write_batch(self, records: Sequence[StepRecord]) -> None:
        known = set(self._known_masks)
        statements: list[Statement] = []
        for record in records:
            statements += encode.encode_step(record, known)
            known.update(mask.fingerprint for mask in record.masks)
        self._commit(statements, f"steps {records[0].step} to {records[-1].step}")
        self._known_masks = known

    def _write_one_by_one(self, records: Sequence[StepRecord]) -> None:
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
            told = refused.pop(-1 if self.failed else 0)
            told.stored = tuple(stored)
            told.others = tuple(error.message for error in refused)
            raise told

    def end_generation(self, record: GenerationEnd) -> None:
        """Record how a branch ended, with its segments as they came out.

        Raises `TraceWriteError`.
        """
        with self._lock:
            self._commit(
                encode.encode_generation_end(record), f"the end of generation {record.generation}"
            )

    def close(self, state: str = "finished") -> None:
        """End the trace in `state` (finished, interrupted, failed) and fold it into one file.

        Closing again does nothing. Raises `TraceWriteError` only when a trace that was recorded
        elsewhere cannot be moved to its place.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._write_end(state)
            folded = self._fold_wal()
            self._db.close()
            self._move_to_target(folded)

    def discard(self) -> None:
        """Remove the trace after it was closed, a WAL that a reader kept from being folded too."""
        for place in {self.path, self.recording_path}:
            places.delete_trace(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("interrupted" if interrupted else "failed" if kind else "finished")

    def _is_stopped(self) -> bool:
        # A forked child shares the connection but not its locks: it must never write.
        return self.failed or self._closed or os.getpid() != self._pid

    def _commit(self, statements: Sequence[Statement], what: str) -> bool:
        """Run the statements in one transaction; False when the writer refuses by now."""
        if self._is_stopped():
            return False
        try:
            self._bind_and_run(statements)
        except (sqlite3.IntegrityError, *_UNBINDABLE) as error:
            raise TraceWriteError(
                f"The trace refuses {what}: {error}.", hint="The recording itself goes on."
            ) from error
        except sqlite3.Error as error:
            self.failed = True
            ended = recording_error(self.recording_path, what, error)
            self._reason = ended.message
            raise ended from error
        return True

    def _bind_and_run(self, statements: Sequence[Statement]) -> None:
        if not self._converts_values:
            try:
                self._transaction(statements)
                return
            except (sqlite3.IntegrityError, *_UNBINDABLE) as error:
                if getattr(error, "sqlite_errorname", "") in _KEY_CONFLICTS:
                    raise
                self._converts_values = True  # whoever sends such values once will send them again
        self._transaction([(sql, bindable(params)) for sql, params in statements])

    def _transaction(self, statements: Sequence[Statement]) -> None:
        execute = self._db.execute
        execute("BEGIN IMMEDIATE")
        try:
            for sql, params in statements:
                execute(sql, params)
            execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:
                    execute("ROLLBACK")
            raise

    def _checkpoint_wal(self) -> None:
        """Fold a long WAL into the file while nobody waits for a step."""
        wal = self.recording_path.with_name(self.recording_path.name + "-wal")
        with suppress(sqlite3.Error, OSError):
            if not self._is_stopped() and wal.stat().st_size > WAL_TIDY_PAGES * 4096:
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _write_end(self, state: str) -> None:
        """Write the final state if that is still possible."""
        facts: dict[str, Any] = {"ended_at": time.time()}
        if self.failed:
            state, facts["reason"] = "failed", self._reason
        with suppress(sqlite3.Error):
            self._transaction(encode.encode_trace_end(state, facts))

    def _fold_wal(self) -> bool:
        """Make one file of the trace; False when a reader or the disk does not let us."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA busy_timeout = 200")
        until = time.monotonic() + READER_WAIT_S
        while True:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self._db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete":
                    return True
            if self.failed or time.monotonic() > until:
                return False
            time.sleep(0.02)

    def _move_to_target(self, folded: bool) -> None:
        if self.recording_path != self.path and folded:
            places.move_to_target(self.recording_path, self.path)
            self.note = f"The trace was recorded on a local disk and moved to {self.path}."
        elif not folded:
            self.note = (
                f"Another program or the disk kept {self.recording_path} from being folded into "
                "one file: as long as a -wal file lies beside it, keep the two together."
            )
