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

from flexinspect.processes import recorder_lives

SUFFIX = "-held"


@dataclass(frozen=True, slots=True)
class Held:
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
        return f"{self._where()} for {seconds:.0f} s{self._why()}"

    def timeless(self) -> str:
        """Return the same without how long it has been, so that it stays what it is."""
        return self._where() + self._why()

    def _where(self) -> str:
        return f"held by {self.by} in {self.function} ({Path(self.file).name}:{self.line})"

    def _why(self) -> str:
        return f": {self.reason}" if self.reason else ""


def held_path(trace: Path) -> Path:
    """Return where the file of a trace lies; `trace` is the file that is being recorded."""
    return trace.with_name(trace.name + SUFFIX)


def hold(trace: Path, held: Held) -> None:
    """Say that the process is held. A folder that cannot be written to leaves it unsaid."""
    path = held_path(trace)
    part = path.with_name(path.name + "-part")
    with suppress(OSError):
        part.write_text(json.dumps(asdict(held)), encoding="utf-8")
        part.replace(path)


def let_go(trace: Path) -> None:
    """Say that it goes on."""
    with suppress(OSError):
        held_path(trace).unlink(missing_ok=True)


def held_now(trace: Path) -> Held | None:
    """Return the stop in which the process that records a trace is now, None in none.

    Costs a look for a file that is not there. The file of a process that died in a stop is removed.
    """
    try:
        held = Held(**json.loads(held_path(trace).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if recorder_lives({"pid": held.pid, "started_at": held.since}):
        return held
    let_go(trace)
    return None
