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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexinspect.capture import Capture, start
from flexinspect.crash import settle_dead
from flexinspect.errors import TraceError
from flexinspect.job import Job, ScriptJob
from flexinspect.panels.source import Source
from flexinspect.processes import recorder_lives
from flexinspect.text import visible
from flexinspect.trace.places import discard
from flexinspect.trace.ranges import step_bounds
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import EventRow
from flexinspect.trace.sequences import n_generations, newest_events

LAST_LINES = 6
CHECK_EVERY_S = 1.0
"""How often it is asked whether the process of somebody else's trace still lives."""
MOST_PRINTS = 1000
MOST_EVENTS = 64
"""Phases that are looked at: only the newest ones say what is going on."""


@dataclass(frozen=True, slots=True)
class Status:
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
    words: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether more may come."""
        return self.state in ("starting", "recording")


class Feed:
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
        self._status = Status()
        self._last_event = 0
        self._seen: tuple[Any, ...] = ()
        self._code: int | None = None
        self._interrupted = self.detached = self.ending = False
        self._next_check = 0.0
        self.prints: deque[str] = deque(maxlen=MOST_PRINTS)
        self.debugger: deque[str] = deque(maxlen=MOST_PRINTS)
        """What a debugger's user has to know of a run that goes on; whoever shows it takes it."""
        self._last_told = 0
        if path is not None:
            self._attach(path)

    @classmethod
    def run(cls, job: Job | ScriptJob) -> Feed:
        """Start a job in a process of its own."""
        return cls(process=start(job))

    def _attach(self, path: Path) -> None:
        if self.reader is not None:
            self.reader.close()
        self.path, self.reader = path, TraceReader(path)
        self.source = Source(self.reader)
        self._seen = ()

    def look(self, generation: int, branch: int = 0) -> Status | None:
        """Return how things stand in a generation, None when nothing has changed since.

        Costs microseconds when nothing has.
        """
        moved = self._follow_process()
        if self.reader is None:
            return self._starting(moved)
        changed = self.reader.changed()
        wanted = (generation, branch, self._code, id(self.reader))
        self._drain_prints()
        moved = moved or self._has_died()
        if not changed and not moved and self._seen == wanted:
            return None
        self._seen = wanted
        self._status = self._read(self.reader, generation, branch)
        return self._status

    def _has_died(self) -> bool:
        """Tell whether a process that is not ours has gone without ending its trace; once."""
        now = time.monotonic()
        if self.process is not None or self._status.state != "recording" or now < self._next_check:
            return False
        self._next_check = now + CHECK_EVERY_S
        return not recorder_lives(self._status.run)

    def _drain_prints(self) -> None:
        """Keep the last lines that the user's code printed."""
        while self.process is not None and not self.process.state.prints.empty():
            self.prints.append(self.process.state.prints.get())

    def _follow_process(self) -> bool:
        """Take in what the process says; True when it has just ended or moved its trace."""
        process = self.process
        if process is None or self._code is not None:
            return False
        said = process.state
        if self.reader is None and said.recording is not None and not said.over:
            with suppress(TraceError):
                self._attach(said.recording)
        self._code = process.poll()
        if self._code is None:
            return False
        self._conclude(process)
        return True

    def _conclude(self, process: Capture) -> None:
        """The process has ended: settle its trace if it could not, find where it lies now."""
        said = process.state
        if self.reader is not None:
            self.reader.close()
        if not said.over and said.recording is not None and said.recording.exists():
            settle_dead(said.recording, process, self._code or 0)
            said.path = said.recording
        elif said.over and said.path is None and said.recording is not None:
            discard(said.recording)
        if said.path is not None and said.path.exists():
            self._attach(said.path)
        else:
            self.reader = self.source = None

    def _starting(self, moved: bool) -> Status | None:
        if not moved and self._seen == ("starting", self._code):
            return None
        self._seen = ("starting", self._code)
        self._status = Status(
            state="starting" if self._code is None else "failed",
            phase="starting the capture process" if self._code is None else "",
            words=self._words(),
        )
        return self._status

    def _read(self, reader: TraceReader, generation: int, branch: int) -> Status:
        with reader.snapshot():
            state = reader.state
            first, last = step_bounds(reader, generation, branch) or (0, None)
            phase, fraction, detail = self._phase(reader)
            if state == "recording":
                self._hear_debugger(reader)
            status = Status(
                state=state,
                phase=phase,
                fraction=fraction,
                detail=detail,
                run={**reader.run(), "model": reader.model(generation)},
                generations=n_generations(reader),
                first_step=first,
                last_step=last,
            )
        return self._with_words(status)

    def _phase(self, reader: TraceReader) -> tuple[str, float | None, str]:
        phase, fraction, detail = self._status.phase, self._status.fraction, self._status.detail
        rows: Sequence[EventRow] = ()
        with suppress(TraceError):  # a cut trace may have lost them, and still have its steps
            rows = newest_events(reader, "phase", self._last_event, MOST_EVENTS)
        for row in rows:
            self._last_event = row.id
            if row.event.text in ("plan", "note"):
                detail = str(row.event.data.get("text", "")) or detail
                continue
            phase, given = row.event.text, row.event.data.get("fraction")
            fraction = float(given) if isinstance(given, (int, float)) else None
            if fraction is not None and not math.isfinite(fraction):
                fraction = None
        return phase, fraction, detail

    def _hear_debugger(self, reader: TraceReader) -> None:
        for row in newest_events(reader, "debugger", self._last_told, MOST_EVENTS):
            self._last_told = row.id
            self.debugger.append(row.event.text)

    def _with_words(self, status: Status) -> Status:
        from dataclasses import replace

        if status.state == "recording" and self.process is None and not recorder_lives(status.run):
            reason = (
                "Its process is gone without having ended the trace; all finished steps are here."
            )
            return replace(status, state="dead", words=(reason,))
        if status.state in ("failed", "interrupted"):
            return replace(status, words=self._words() or _reasons(status, self.reader))
        return status

    def _words(self) -> tuple[str, ...]:
        """Return why our own process ended badly: its sentence, or how it died, with last lines."""
        process = self.process
        if process is None or self._code in (None, 0, 130):
            return ()
        said = process.state
        if said.error:
            return tuple(filter(None, (visible(said.error), visible(said.hint or ""))))
        last = [visible(line) for line in process.last_words()[-LAST_LINES:]]
        return (process.how_it_ended(self._code or 0), *last)

    @property
    def waiting(self) -> bool:
        """Whether the first step is still to come."""
        return self._status.live and self._status.last_step is None

    @property
    def withdrawn(self) -> bool:
        """Whether our own process has removed its trace again, as it does when nothing ran."""
        return self.process is not None and self.path is not None and not self.path.exists()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, None while it runs or when there is none."""
        return self._code

    @property
    def stopping(self) -> bool:
        """Whether our process was asked to end."""
        return self._interrupted

    def interrupt(self) -> None:
        """Ask our process to end its generation and its trace; once is enough.

        One that has ended its trace ends by itself, with an exit code of its own.
        """
        if self.process is None or self.process.state.over:
            return
        if not self._interrupted:
            self._interrupted = True
            self.process.interrupt()

    def detach(self) -> bool:
        """Let our process go on when the interface ends; False where that cannot be."""
        self.detached = self.process is not None and self.process.detach()
        return self.detached

    def kill(self) -> None:
        """End our process at once; its trace holds every finished step."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Let go of the file."""
        if self.reader is not None:
            self.reader.close()


def _reasons(status: Status, reader: TraceReader | None) -> tuple[str, ...]:
    """Return what a finished trace says of its own bad end."""
    reason = status.run.get("reason")
    words = [visible(str(reason))] if reason else []
    if reader is not None:
        words += [visible(row.event.text) for row in newest_events(reader, "error", 0, 1)]
    return tuple(words)
