"""Two small files beside a trace that is being recorded: its last kernel call, its debugger stop.

The last kernel call (`-last-call`) is written into a file mapped into memory. If compiled code
crashes the process, the file remains, so that the parent process can report where it crashed. Only
calls of compiled FlexAttention are noted, and only they create the file; closing the trace removes
it.

The debugger stop (`-debugger-stop`) exists while a debugger holds the process, which can then
neither answer nor write to the trace. A stop of a dead process does not count.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.core.environment import is_recorder_alive, replace_file
from flexinspect.core.parsing import parse_json

LAST_CALL_SUFFIX = "-last-call"

_HEADER = struct.Struct("<B3x6i")
_SIZE = 512
_MAX_TEXT_BYTES = _SIZE - _HEADER.size
CallPlace = tuple[int, int, int]  # generation, step and layer, -1 for what is not known
NO_PLACE: CallPlace = (-1, -1, -1)


class LastKernelCall(Struct, frozen=True):
    """A kernel call: its place, its lengths, and a description.

    `is_running` is whether the call had not returned. `generation`, `step` and `layer` are None
    outside of a model's forward.
    """

    is_running: bool
    generation: int | None
    step: int | None
    layer: int | None
    q_len: int
    kv_len: int
    description: str


def last_call_path(trace: Path) -> Path:
    """Return the path of the file with the last kernel call of a trace."""
    return trace.with_name(trace.name + LAST_CALL_SUFFIX)


class LastCallWriter:
    """Writes the last kernel call of one trace; only for the process that records it."""

    def __init__(self, trace: Path) -> None:
        self._path = last_call_path(trace)
        self._map: mmap.mmap | None = None
        self._pid = os.getpid()
        self._what = ""
        self._n_bytes = 0
        self._is_closed = False

    def enter(self, place: CallPlace, q_len: int, kv_len: int, what: str) -> None:
        """Note a call that begins; a forked child, which shares the file, must not call this."""
        if self._is_closed:
            return
        if self._map is None:
            try:
                with self._path.open("w+b") as file:
                    file.truncate(_SIZE)
                    self._map = mmap.mmap(file.fileno(), _SIZE)
            except (OSError, ValueError):
                self._is_closed = True
                return
        if what != self._what:
            text = what.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
            self._map[_HEADER.size : _HEADER.size + len(text)] = text
            self._what, self._n_bytes = what, len(text)
        _HEADER.pack_into(self._map, 0, 1, *place, q_len, kv_len, self._n_bytes)

    def leave(self) -> None:
        """Note that the call returned or raised."""
        if self._map is not None:
            self._map[0] = 0

    def remove(self) -> None:
        """Remove the file; later calls are not noted."""
        if os.getpid() != self._pid:
            return
        self._is_closed, mapped, self._map = True, self._map, None
        if mapped is not None:
            mapped.close()
            with suppress(OSError):
                self._path.unlink()


def take_last_call(trace: Path) -> LastKernelCall | None:
    """Return the last kernel call of a trace and remove its file; None when there is none."""
    path = last_call_path(trace)
    try:
        data = path.read_bytes()
        path.unlink()
        state, *place, q_len, kv_len, n_bytes = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return None
    what = data[_HEADER.size :][: max(n_bytes, 0)].decode("utf-8", "replace")
    if not what:
        return None
    generation, step, layer = (None if number < 0 else number for number in place)
    return LastKernelCall(bool(state), generation, step, layer, q_len, kv_len, what)


STOP_SUFFIX = "-debugger-stop"


class DebuggerStop(Struct, frozen=True):
    """A stop of process `pid` in a debugger.

    `since` is in seconds since the epoch; `reason` is empty when it is not known.
    """

    pid: int
    debugger: str
    file: str
    line: int
    function: str
    since: float
    reason: str = ""

    def sentence(self, now: float | None = None) -> str:
        """Return "held by debugpy in attend (model.py:12) for 40 s: entropy > 3"."""
        return self._sentence(f" for {max((now or time.time()) - self.since, 0):.0f} s")

    def sentence_without_time(self) -> str:
        """Return the sentence without the duration, so that it does not change with time."""
        return self._sentence("")

    def _sentence(self, time: str) -> str:
        where = f"{self.function} ({Path(self.file).name}:{self.line})"
        reason = f": {self.reason}" if self.reason else ""
        return f"held by {self.debugger} in {where}{time}{reason}"


def stop_path(trace: Path) -> Path:
    """Return the path of the file with the debugger stop of a trace that is being recorded."""
    return trace.with_name(trace.name + STOP_SUFFIX)


def write_stop(trace: Path, stop: DebuggerStop) -> None:
    """Note that a debugger holds the process; without effect in a read-only folder."""
    with suppress(OSError):
        replace_file(stop_path(trace), json.dumps(asdict(stop)).encode())


def remove_stop(trace: Path) -> None:
    """Note that the process continues."""
    with suppress(OSError):
        stop_path(trace).unlink(missing_ok=True)


def read_stop(trace: Path) -> DebuggerStop | None:
    """Return the debugger stop that holds the process recording a trace, None when there is none.

    Usually costs one attempt to open a missing file. The file of a process that died in a stop is
    removed.
    """
    try:
        stop = DebuggerStop(**parse_json(stop_path(trace).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if is_recorder_alive({"pid": stop.pid, "started_at": stop.since}):
        return stop
    remove_stop(trace)
    return None
