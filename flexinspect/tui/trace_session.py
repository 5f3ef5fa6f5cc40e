"""Where the interface's data come from: a trace that is finished, growing, or about to begin.

Live and afterwards are the same: whatever is shown was read from the trace. Only what a trace
cannot say (that its process died, and with which last words) comes from the process itself.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import TraceError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.source import Source
from flexinspect.trace.file.location import delete_trace
from flexinspect.trace.queries.range_queries import step_bounds
from flexinspect.trace.queries.search_queries import n_generations, newest_events
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import EventRow

if TYPE_CHECKING:
    from flexinspect.launch.child_process import Capture
    from flexinspect.records.job import Job, ScriptJob

LAST_LINES = 6
CHECK_EVERY_S = 1.0
"""How often it is asked whether the process of somebody else's trace still lives."""
MAX_PRINTS = 1000
MAX_EVENTS = 64
"""Phases that are looked at: only the newest ones say what is going on."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of the run at one moment.

    `state` is "starting" before there is a trace, then that of the trace, or "dead" when its
    process is gone without having ended it. `phase` and `fraction` (0 to 1) are what the process is
    doing now; `words` is what there is to say if it went wrong, its reason first.
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

    @property
    def live(self) -> bool:
        """Whether more may come."""
        return self.state in ("starting", "recording")


class TraceSession:
    """One trace and, for a run of our own, the process that records it.

    `look` is called from one thread at a time. Raises `TraceError` for a trace that cannot be read.
    When the interface closes, the process is interrupted, unless it is `detached` and goes on, or
    `ending` by itself as it was asked to.
    """

    def __init__(self, path: Path | None = None, process: Capture | None = None) -> None:
        self.path = path
        self.process = process
        self.reader: TraceReader | None = None
        self.source: Source | None = None
        self._status = RunStatus()
        self._last_event = 0
        self._last_poll: tuple[Any, ...] = ()
        self._exit_code: int | None = None
        self._interrupted = self.is_detached = self.is_ending = False
        self._next_check = 0.0
        self.prints: deque[str] = deque(maxlen=MAX_PRINTS)
        self.debugger_messages: deque[str] = deque(maxlen=MAX_PRINTS)
        """What a debugger's user has to know of a run that goes on; whoever shows it takes it."""
        self._last_debugger_event = 0
        if path is not None:
            self._attach(path)

    @classmethod
    def start(cls, job: Job | ScriptJob) -> TraceSession:
        """Start a job in a process of its own."""
        from flexinspect.launch.child_process import start_capture  # not to open a finished trace

        return cls(process=start_capture(job))

    def _attach(self, path: Path) -> None:
        if self.reader is not None:
            self.reader.close()
        self.path, self.reader = path, TraceReader(path)
        self.source = Source(self.reader)
        self._last_poll = ()

    def poll(self, generation: int, branch: int = 0) -> RunStatus | None:
        """Return how things stand in a generation, None when nothing has changed since.

        Costs microseconds when nothing has.
        """
        moved = self._follow_process()
        if self.reader is None:
            return self._starting_status(moved)
        changed = self.reader.changed()
        poll_key = (generation, branch, self._exit_code, id(self.reader))
        self._drain_prints()
        moved = moved or self._has_died()
        if not changed and not moved and self._last_poll == poll_key:
            return None
        self._last_poll = poll_key
        self._status = self._read_status(self.reader, generation, branch)
        return self._status

    def _has_died(self) -> bool:
        """Tell whether a process that is not ours has gone without ending its trace; once."""
        now = time.monotonic()
        if self.process is not None or self._status.state != "recording" or now < self._next_check:
            return False
        self._next_check = now + CHECK_EVERY_S
        return not is_recorder_alive(self._status.run)

    def _drain_prints(self) -> None:
        """Keep the last lines that the user's code printed."""
        while self.process is not None and not self.process.state.prints.empty():
            self.prints.append(self.process.state.prints.get())

    def _follow_process(self) -> bool:
        """Take in what the process says; True when it has just ended or moved its trace."""
        process = self.process
        if process is None or self._exit_code is not None:
            return False
        state = process.state
        if self.reader is None and state.recording is not None and not state.is_over:
            with suppress(TraceError):
                self._attach(state.recording)
        self._exit_code = process.poll()
        if self._exit_code is None:
            return False
        self._finish_process(process)
        return True

    def _finish_process(self, process: Capture) -> None:
        """The process has ended: settle its trace if it could not, find where it lies now."""
        state = process.state
        if self.reader is not None:
            self.reader.close()
        if not state.is_over and state.recording is not None and state.recording.exists():
            from flexinspect.launch.crash import close_crashed_trace  # loads rules

            close_crashed_trace(state.recording, process, self._exit_code or 0)
            state.path = state.recording
        elif state.is_over and state.path is None and state.recording is not None:
            delete_trace(state.recording)
        if state.path is not None and state.path.exists():
            self._attach(state.path)
        else:
            self.reader = self.source = None

    def _starting_status(self, moved: bool) -> RunStatus | None:
        if not moved and self._last_poll == ("starting", self._exit_code):
            return None
        self._last_poll = ("starting", self._exit_code)
        self._status = RunStatus(
            state="starting" if self._exit_code is None else "failed",
            phase="starting the capture process" if self._exit_code is None else "",
            error_lines=self._process_errors(),
        )
        return self._status

    def _read_status(self, reader: TraceReader, generation: int, branch: int) -> RunStatus:
        with reader.snapshot():
            state = reader.state
            first, last = step_bounds(reader, generation, branch) or (0, None)
            phase, fraction, detail = self._read_phase(reader)
            if state == "recording":
                self._read_debugger_events(reader)
            status = RunStatus(
                state=state,
                phase=phase,
                fraction=fraction,
                detail=detail,
                run={**reader.run(), "model": reader.model(generation)},
                generations=n_generations(reader),
                first_step=first,
                last_step=last,
            )
        return self._with_errors(status)

    def _read_phase(self, reader: TraceReader) -> tuple[str, float | None, str]:
        phase, fraction, detail = self._status.phase, self._status.fraction, self._status.detail
        rows: Sequence[EventRow] = ()
        with suppress(TraceError):  # a cut trace may have lost them, and still have its steps
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

    def _read_debugger_events(self, reader: TraceReader) -> None:
        for row in newest_events(reader, "debugger", self._last_debugger_event, MAX_EVENTS):
            self._last_debugger_event = row.id
            self.debugger_messages.append(row.event.text)

    def _with_errors(self, status: RunStatus) -> RunStatus:
        if (
            status.state == "recording"
            and self.process is None
            and not is_recorder_alive(status.run)
        ):
            reason = (
                "Its process is gone without having ended the trace; all finished steps are here."
            )
            return replace(status, state="dead", error_lines=(reason,))
        if status.state in ("failed", "interrupted"):
            return replace(
                status, error_lines=self._process_errors() or _trace_errors(status, self.reader)
            )
        return status

    def _process_errors(self) -> tuple[str, ...]:
        """Return why our own process ended badly: its sentence, or how it died, with last lines."""
        process = self.process
        if process is None or self._exit_code in (None, 0, 130):
            return ()
        state = process.state
        if state.error:
            return tuple(
                filter(
                    None, (escape_unprintable(state.error), escape_unprintable(state.hint or ""))
                )
            )
        last = [escape_unprintable(line) for line in process.last_stderr_lines()[-LAST_LINES:]]
        return (process.describe_exit(self._exit_code or 0), *last)

    @property
    def is_waiting(self) -> bool:
        """Whether the first step is still to come."""
        return self._status.live and self._status.last_step is None

    @property
    def is_trace_removed(self) -> bool:
        """Whether our own process has removed its trace again, as it does when nothing ran."""
        return self.process is not None and self.path is not None and not self.path.exists()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, None while it runs or when there is none."""
        return self._exit_code

    @property
    def is_stopping(self) -> bool:
        """Whether our process was asked to end."""
        return self._interrupted

    def interrupt(self) -> None:
        """Ask our process to end its generation and its trace; once is enough.

        One that has ended its trace ends by itself, with an exit code of its own.
        """
        if self.process is None or self.process.state.is_over:
            return
        if not self._interrupted:
            self._interrupted = True
            self.process.interrupt()

    def detach(self) -> bool:
        """Let our process go on when the interface ends; False where that cannot be."""
        self.is_detached = self.process is not None and self.process.detach()
        return self.is_detached

    def kill(self) -> None:
        """End our process at once; its trace holds every finished step."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Let go of the file."""
        if self.reader is not None:
            self.reader.close()


def _trace_errors(status: RunStatus, reader: TraceReader | None) -> tuple[str, ...]:
    """Return what a finished trace says of its own bad end."""
    reason = status.run.get("reason")
    words = [escape_unprintable(str(reason))] if reason else []
    if reader is not None:
        words += [
            escape_unprintable(row.event.text) for row in newest_events(reader, "error", 0, 1)
        ]
    return tuple(words)
