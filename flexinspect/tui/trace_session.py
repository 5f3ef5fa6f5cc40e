"""The data source of the interface: a trace that is finished, growing, or about to begin.

`CaptureClient` sends commands to the capture that writes it.

Everything shown is read from the trace, live and afterwards. Only what a trace cannot contain, such
as the death of its process and its last output, comes from the process itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.core import plugins
from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import ControlError, FlexInspectError, TraceError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.panel_source import Source
from flexinspect.trace.file.side_files import read_stop
from flexinspect.trace.queries import (
    n_generations,
    n_reviews,
    newest_events,
    step_bounds,
    unfinished_generations,
)
from flexinspect.trace.query_results import EventRow
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.analysis.offline_rules import Review
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import StatusResponse
    from flexinspect.launch.child_process import Capture

T = TypeVar("T")

LAST_LINES = 6
MAX_NOTES = 2
"""Notes of a kind in the banner."""
CHECK_EVERY_S = 1.0
"""How often the process of a trace that is not ours is checked for being alive."""
MAX_EVENTS = 64
"""Newest events of a kind that are read: older phases do not matter any more."""


class RunStatus(Struct, frozen=True):
    """State of a run at one moment.

    `state` is "starting" before there is a trace, then that of the trace, or "dead" when its
    process ended without finishing it. `phase` and its `fraction` (0 to 1) are what the process is
    doing; `error_lines` describe a failure, its reason first. `notes` say, of a trace without a
    step, why it has none and where to look.
    """

    state: str = "starting"
    phase: str = "starting the capture process"
    fraction: float | None = None
    detail: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    generations: int = 0
    first_step: int = 0
    last_step: int | None = None
    error_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the trace may still grow."""
        return self.state in ("starting", "recording")


class TraceSession:
    """A trace and, for a run of the interface, the process that records it.

    `poll` must be called from one thread at a time. Raises `TraceError` for a trace that could not
    be read. When the interface closes, the process is interrupted, unless `is_detached` (it
    continues) or `is_ending` (it was asked to end). `exit_code` is None while the process runs and
    when there is none; `is_stopping` tells that it was interrupted.
    """

    def __init__(self, path: Path | None = None, process: Capture | None = None) -> None:
        self.path = path
        self.process = process
        self.reader: TraceReader | None = None
        self.source: Source | None = None
        self._status = RunStatus()
        self._last_event = 0
        self._last_poll: tuple[Any, ...] = ()
        self.exit_code: int | None = None
        self.is_stopping = self.is_detached = self.is_ending = False
        self._next_check = 0.0
        self.debugger_messages: deque[str] = deque()
        """Messages for the user of a debugger; the screen that shows them removes them."""
        self._last_debugger_event = 0
        if path is not None:
            self._attach(path)

    def _attach(self, path: Path) -> None:
        self.close()
        self.path, self.reader = path, TraceReader(path)
        self.source = Source(self.reader)
        self._last_poll = ()

    def poll(self, generation: int, branch: int = 0) -> RunStatus | None:
        """Return the status for a generation and branch, None if nothing has changed.

        Takes microseconds if nothing has changed. Raises `TraceError`.
        """
        self._follow_process()
        has_changed = self.reader is not None and (self.reader.changed() or self._has_died())
        poll_key = (generation, branch, self.exit_code)
        if not has_changed and self._last_poll == poll_key:
            return None
        self._last_poll = poll_key
        if self.reader is not None:
            self._status = self._read_status(self.reader, generation, branch)
        elif self.exit_code is None:
            self._status = RunStatus()
        else:
            self._status = RunStatus("failed", phase="", error_lines=self._process_errors())
        return self._status

    def _has_died(self) -> bool:
        """Return whether a process that is not ours ended without finishing its trace."""
        now = time.monotonic()
        if self.process is not None or self._status.state != "recording" or now < self._next_check:
            return False
        self._next_check = now + CHECK_EVERY_S
        return not is_recorder_alive(self._status.run)

    def _follow_process(self) -> None:
        """Open the trace of our process once there is one, and finish it when it has ended."""
        process = self.process
        if process is None or self.exit_code is not None:
            return
        state = process.state
        if self.reader is None and state.recording is not None and not state.is_over:
            with suppress(TraceError):
                self._attach(state.recording)
        self.exit_code = process.poll()
        if self.exit_code is None:
            return
        from flexinspect.launch.crash import finish_trace  # loads rules

        self.close()
        path = finish_trace(process, self.exit_code)
        if path is not None:
            self._attach(path)
        else:
            self.reader = self.source = None

    def _read_status(self, reader: TraceReader, generation: int, branch: int) -> RunStatus:
        with reader.snapshot():
            state = reader.state
            first, last_step = step_bounds(reader, generation, branch) or (0, None)
            phase, fraction, detail = self._read_phase(reader)
            if state == "recording":
                for row in newest_events(reader, "debugger", self._last_debugger_event, MAX_EVENTS):
                    self._last_debugger_event = row.id
                    self.debugger_messages.append(row.event.text)
            status = RunStatus(
                state=state,
                phase=phase,
                fraction=fraction,
                detail=detail,
                run={**reader.run(), "model": reader.model(generation)},
                generations=n_generations(reader),
                first_step=first,
                last_step=last_step,
                notes=_read_notes(reader) if last_step is None else (),
            )
        return self._with_errors(status)

    def _read_phase(self, reader: TraceReader) -> tuple[str, float | None, str]:
        phase, fraction, detail = self._status.phase, self._status.fraction, self._status.detail
        rows: Sequence[EventRow] = ()
        with suppress(TraceError):  # a truncated trace may have lost its events but have steps
            rows = newest_events(reader, "phase", self._last_event, MAX_EVENTS)
        for row in rows:
            self._last_event = row.id
            if row.event.text in ("plan", "note"):
                detail = str(row.event.data.get("text", "")) or detail
                continue
            phase, value = row.event.text, row.event.data.get("fraction")
            fraction = float(value) if isinstance(value, (int, float)) else None
            if fraction is not None and not math.isfinite(fraction):
                fraction = None
        return phase, fraction, detail

    def _with_errors(self, status: RunStatus) -> RunStatus:
        is_foreign = status.state == "recording" and self.process is None
        if is_foreign and not is_recorder_alive(status.run):
            reason = "Its process ended without finishing the trace; all finished steps are here."
            return replace(status, state="dead", error_lines=(reason,))
        if status.state in ("failed", "interrupted"):
            recorded = status.run.get("reason")
            texts = [str(recorded)] if recorded else []
            if self.reader is not None:
                texts += [row.event.text for row in newest_events(self.reader, "error", 0, 1)]
            lines = self._process_errors() or tuple(map(escape_unprintable, texts))
            return replace(status, error_lines=lines)
        return status

    def _process_errors(self) -> tuple[str, ...]:
        """Return why our process failed: its error, or its exit code and last lines of stderr."""
        process = self.process
        if process is None or self.exit_code in (None, 0, 130):
            return ()
        state = process.state
        if state.error:
            return tuple(escape_unprintable(text) for text in (state.error, state.hint) if text)
        last = [escape_unprintable(line) for line in process.last_stderr_lines()[-LAST_LINES:]]
        return (process.describe_exit(self.exit_code or 0), *last)

    @property
    def is_waiting(self) -> bool:
        """Whether no step has been recorded yet."""
        return self._status.live and self._status.last_step is None

    @property
    def is_trace_removed(self) -> bool:
        """Whether our process has removed its trace, as it does when nothing ran."""
        return self.process is not None and self.path is not None and not self.path.exists()

    def missing_model(self) -> ControlError:
        """Return the error of a command where no model takes one."""
        state = self._status.state
        if state == "finished" and self.process is None:
            return ControlError(
                "This trace is finished, so it has no model to control.",
                hint="To keep one: flexinspect run --hold …",
            )
        if state == "recording" and is_recorder_alive(self._status.run):
            return ControlError("This run takes no commands: it was started with --no-control.")
        return ControlError("The run has ended, so it has no model to control.")

    def interrupt(self) -> None:
        """Ask our process, once, to end its generation and finish its trace.

        A process that has finished its trace is left to end with its own exit code.
        """
        if self.process is None or self.process.state.is_over:
            return
        if not self.is_stopping:
            self.is_stopping = True
            self.process.interrupt()

    def detach(self) -> bool:
        """Let our process continue after the interface closes; False where that is impossible."""
        self.is_detached = self.process is not None and self.process.detach()
        return self.is_detached

    def close(self) -> None:
        """Close the trace."""
        if self.reader is not None:
            self.reader.close()


def _read_notes(reader: TraceReader) -> tuple[str, ...]:
    """Return where the program records itself, and what was not recorded."""
    rows: list[EventRow] = []
    with suppress(TraceError):
        for kind in ("own-trace", "not-recorded"):
            rows += newest_events(reader, kind, 0, MAX_NOTES)
    return tuple(escape_unprintable(row.event.text) for row in rows)


POLL_TIMEOUT_S = 2.0
"""Timeout of a status request; a capture that answers later is probably stopped."""


class CaptureStatus(Struct, frozen=True):
    """State of the capture: `status` is None without a capture and for an unresponsive one.

    `debugger_stop` is a sentence on where a debugger has stopped it, otherwise empty.
    """

    status: StatusResponse | None = None
    is_unresponsive: bool = False
    debugger_stop: str = ""

    @property
    def state(self) -> str:
        """The state of the capture, empty when unknown."""
        return self.status.state if self.status is not None else ""

    def can_rewind(self, generation: int) -> bool:
        """Whether steps of this generation can be restored and forked."""
        status = self.status
        return status is not None and status.can_rewind and status.place.generation == generation


class CaptureClient:
    """Sends commands to the capture that writes a session's trace.

    Every method may block, so none may be called in the event loop. The modules of control are
    imported on first use: most traces are finished, and have no capture.
    """

    def __init__(self, session: TraceSession) -> None:
        self._session = session
        self._client: ControlClient | None = None

    def client(self) -> ControlClient:
        """Return the client of the capture. Raises `ControlError` when there is none."""
        session = self._session
        self._client = self._client or self._find_client()
        if self._client is not None:
            return self._client
        if session.process is None or session.exit_code is not None:
            raise session.missing_model()
        if session.is_waiting:
            raise ControlError(
                "The run takes no commands yet: it is still loading.",
                hint="A generation accepts commands once its process has started, "
                "a program once it has loaded torch.",
            )
        raise ControlError("This run takes no commands: it was started with --no-control.")

    def call(self, command: Callable[[ControlClient], T]) -> T:
        """Run a command of the client. Raises `ControlError`, also for a capture that has ended."""
        try:
            return command(self.client())
        except ControlError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
                self._client = None
                self.client()
            raise

    def poll(self) -> CaptureStatus:
        """Return the state of the capture. Never raises `ControlError`."""
        from flexinspect.control.client import ControlClient

        stop = read_stop(self._session.path) if self._session.path is not None else None
        debugger_stop = "" if stop is None else f"The model is {stop.sentence_without_time()}."
        try:
            quick = ControlClient(self.client().address, timeout_s=POLL_TIMEOUT_S)
            return CaptureStatus(quick.status(), debugger_stop=debugger_stop)
        except ControlError as error:
            is_unresponsive = isinstance(error.__cause__, TimeoutError)
            if not is_unresponsive:
                self._client = None
            return CaptureStatus(is_unresponsive=is_unresponsive, debugger_stop=debugger_stop)

    def _find_client(self) -> ControlClient | None:
        from flexinspect.control.client import ControlClient
        from flexinspect.control.discovery import running

        process, path = self._session.process, self._session.path
        pid = process.pid if process is not None else None
        for entry in running():
            if entry.pid == pid or (path is not None and entry.is_recording(path)):
                return ControlClient(entry.address)
        return None


REVIEW_DELAY_S = 0.3
"""Delay before rules are imported, which would compete with drawing the first screen."""


async def review_in_background(session: TraceSession, pool: Executor) -> str | None:
    """Run the pending rules; return None if there are none, else a note, which may be empty.

    Afterwards the session's reader returns their findings, stored in the trace or not.
    """
    reader = session.reader
    if reader is None:
        return None
    if not await asyncio.get_running_loop().run_in_executor(pool, needs_review, reader):
        return None
    result = await _run_review(reader)
    if result.unstored:
        from flexinspect.trace.file.writer import review_statements

        reader.add_reviews(review_statements(result.unstored))
    return result.note


def needs_review(reader: TraceReader) -> bool:
    """Return whether any rule has not checked a part of the trace yet."""
    try:
        if _all_rules_ran(reader):
            return False
        from flexinspect.analysis.offline_rules import pending_tasks
        from flexinspect.rules.engine import load_rules

        return bool(pending_tasks(reader, load_rules().rules))
    except FlexInspectError:
        return False  # the panels show what is wrong with the trace


def _all_rules_ran(reader: TraceReader) -> bool:
    """Return whether each rule checked each generation, as far as names tell without an import.

    Importing the rules takes as long as drawing the first screen.
    """
    live, n_done = reader.run().get("rules"), n_reviews(reader)
    names = [name for name in plugins.names(plugins.RULES) if name not in (live or ())]
    n = n_generations(reader)
    return all(n_done.get(name, 0) >= n for name in names) and not unfinished_generations(reader)


async def _run_review(reader: TraceReader) -> Review:
    from flexinspect.analysis.offline_rules import Review, review_command, review_from_json

    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    command = review_command(reader.path)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=nothing, stdout=pipe, stderr=nothing, start_new_session=True
    )
    try:
        text, _ = await process.communicate()
    finally:
        if process.returncode is None:  # the interface was closed
            with suppress(ProcessLookupError):
                process.kill()
    try:
        return review_from_json(text.decode())
    except ValueError:
        return Review(0, (), "The offline rules failed; run flexinspect findings to see why.")
