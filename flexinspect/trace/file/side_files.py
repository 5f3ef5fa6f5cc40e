"""The crumb: a few bytes beside a trace that say which kernel call its process was last in.

A process that compiled code takes down says nothing more. What it has written into a file that is
mapped into memory stays, so whoever started it can still say where it was. Only calls of compiled
FlexAttention are noted, and only they make the file; it goes when the trace is closed.

While a debugger holds it, the process can neither answer nor write, so the file is there from the
stop to the moment it goes on. A viewer asks once per look; what a dead process left is none.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flexinspect.core.environment import is_recorder_alive

LAST_CALL_SUFFIX = "-crumb"

_HEADER = struct.Struct("<B3x6i")
_SIZE = 512
_MAX_TEXT_BYTES = _SIZE - _HEADER.size

CallPlace = tuple[int, int, int]
"""Generation, step and layer, -1 for what is not known."""

NO_PLACE: CallPlace = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class LastKernelCall:
    """A kernel call: whether it was entered and not left, where, its lengths, and what it was.

    `generation`, `step` and `layer` are None outside of a model's forward.
    """

    entered: bool
    generation: int | None
    step: int | None
    layer: int | None
    q_len: int
    kv_len: int
    what: str


def last_call_path(trace: Path) -> Path:
    """Return where the crumb of a trace lies."""
    return trace.with_name(trace.name + LAST_CALL_SUFFIX)


class LastCallWriter:
    """Writes the crumb of one trace, from the process that records it alone."""

    def __init__(self, trace: Path) -> None:
        self._path = last_call_path(trace)
        self._map: mmap.mmap | None = None
        self._pid = os.getpid()
        self._what = ""
        self._n_bytes = 0
        self._is_closed = False

    def enter(self, place: CallPlace, q_len: int, kv_len: int, what: str) -> None:
        """Say which call begins; a forked child, which shares the file, must not call this."""
        if self._map is None and not self._open():
            return
        assert self._map is not None
        if what != self._what:
            self._write_text(what)
        _HEADER.pack_into(self._map, 0, 1, *place, q_len, kv_len, self._n_bytes)

    def leave(self) -> None:
        """Say that it returned, or raised."""
        if self._map is not None:
            self._map[0] = 0

    def remove(self) -> None:
        """Take the file away; nothing is noted any more."""
        if os.getpid() != self._pid:
            return
        self._is_closed, made, self._map = True, self._map, None
        if made is not None:
            made.close()
            with suppress(OSError):
                self._path.unlink()

    def _open(self) -> bool:
        if self._is_closed:
            return False
        try:
            with self._path.open("w+b") as file:
                file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except (OSError, ValueError):
            self._is_closed = True
        return self._map is not None

    def _write_text(self, what: str) -> None:
        assert self._map is not None
        text = what.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
        self._map[_HEADER.size : _HEADER.size + len(text)] = text
        self._what, self._n_bytes = what, len(text)


def take_last_call(trace: Path) -> LastKernelCall | None:
    """Return what the crumb of a trace says, and remove it; None where there is none."""
    path = last_call_path(trace)
    try:
        data = path.read_bytes()
        path.unlink()
        state, generation, step, layer, q_len, kv_len, n_bytes = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return None
    what = data[_HEADER.size :][: max(n_bytes, 0)].decode("utf-8", "replace")
    if not what:
        return None
    return LastKernelCall(
        bool(state),
        _none_if_negative(generation),
        _none_if_negative(step),
        _none_if_negative(layer),
        q_len,
        kv_len,
        what,
    )


def _none_if_negative(number: int) -> int | None:
    return None if number < 0 else number


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
