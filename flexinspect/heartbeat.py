"""Whether a debugger holds the capture process now, and where: a small file beside its trace.

While a debugger holds it, the process can neither answer nor write, so the file is there from the
stop to the moment it goes on. A viewer asks once per look; what a dead process left is none.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flexinspect.processes import is_recorder_alive

STOP_SUFFIX = "-held"


@dataclass(frozen=True, slots=True)
class DebuggerStop:
    """A stop: by which debugger, where, since when (seconds since 1970), and why if that is known.

    `pid` is the process that is held.
    """

    pid: int
    by: str
    file: str
    line: int
    function: str
    since: float
    reason: str = ""

    def sentence(self, now: float | None = None) -> str:
        """Return "held by debugpy in attend (model.py:12) for 40 s: entropy > 3"."""
        seconds = max((now or time.time()) - self.since, 0)
        return f"{self._location()} for {seconds:.0f} s{self._reason_text()}"

    def sentence_without_time(self) -> str:
        """Return the same without how long it has been, so that it stays what it is."""
        return self._location() + self._reason_text()

    def _location(self) -> str:
        return f"held by {self.by} in {self.function} ({Path(self.file).name}:{self.line})"

    def _reason_text(self) -> str:
        return f": {self.reason}" if self.reason else ""


def stop_path(trace: Path) -> Path:
    """Return where the file of a trace lies; `trace` is the file that is being recorded."""
    return trace.with_name(trace.name + STOP_SUFFIX)


def write_stop(trace: Path, stop: DebuggerStop) -> None:
    """Say that the process is held. A folder that cannot be written to leaves it unsaid."""
    path = stop_path(trace)
    part = path.with_name(path.name + "-part")
    with suppress(OSError):
        part.write_text(json.dumps(asdict(stop)), encoding="utf-8")
        part.replace(path)


def remove_stop(trace: Path) -> None:
    """Say that it goes on."""
    with suppress(OSError):
        stop_path(trace).unlink(missing_ok=True)


def read_stop(trace: Path) -> DebuggerStop | None:
    """Return the stop in which the process that records a trace is now, None in none.

    Costs a look for a file that is not there. The file of a process that died in a stop is removed.
    """
    try:
        held = DebuggerStop(**json.loads(stop_path(trace).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if is_recorder_alive({"pid": held.pid, "started_at": held.since}):
        return held
    remove_stop(trace)
    return None
