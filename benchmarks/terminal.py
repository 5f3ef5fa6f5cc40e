"""A real pseudo-terminal with the inspector in it: type, and see when the frame is there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SILENCE_S = 0.06
"""A frame counts as complete when nothing more has come for so long."""

FIRST_BYTE_S = 3.0
"""A frame begins so soon after its key, also on a loaded machine."""


class Terminal:
    """A Python program in a pseudo-terminal of so many cells; what it writes is not drawn.

    `program` are the arguments of Python, by default those that run `flexinspect`.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        width: int = 120,
        height: int = 40,
        program: Sequence[str] = ("-P", "-m", "flexinspect"),
    ) -> None:
        self.started = time.perf_counter()
        self.output = b""
        self.n_bytes = 0
        self.drawn_cpu_s = 0.0
        """CPU seconds of the process when the last byte was read in `settle`."""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            os.environ.pop("NO_COLOR", None)
            os.execv(sys.executable, [sys.executable, *program, *args])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def until(self, wanted: bytes, timeout: float = 60.0) -> float:
        """Return the seconds from now until `wanted` was written. Raises `TimeoutError`."""
        begun, seen = time.perf_counter(), b""
        while wanted not in seen:
            left = timeout - (time.perf_counter() - begun)
            if left <= 0:
                raise TimeoutError(f"{wanted!r} was never written; the last: {seen[-400:]!r}")
            seen += self._read(left)
        return time.perf_counter() - begun

    def settle(self, timeout: float = 60.0, silence: float = SILENCE_S) -> float:
        """Read until nothing comes for `silence` seconds; return those to the last byte."""
        begun = last = time.perf_counter()
        while time.perf_counter() - begun < timeout:
            if not self._read(silence):
                return last - begun
            last = time.perf_counter()
            self.drawn_cpu_s = self.cpu_s()
        raise TimeoutError("the interface never came to rest")

    def drain(self, seconds: float) -> None:
        """Read what is written in so many seconds."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self._read(left)

    def press(self, key: bytes) -> None:
        """Type a key."""
        os.write(self._fd, key)

    def frame(self, key: bytes, silence: float = SILENCE_S) -> float:
        """Type a key; return the seconds until the whole frame was written.

        Raises `TimeoutError` if the key changes nothing on the screen.
        """
        begun = time.perf_counter()
        self.press(key)
        if not self._read(FIRST_BYTE_S):
            raise TimeoutError(f"nothing was written after the key {key!r}")
        return time.perf_counter() - begun + self.settle(silence=silence)

    def resident(self) -> int:
        """Return the resident set of the process, bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process so far, of the threads that still run.

        The clock of `/proc/PID/stat` has steps of 10 ms; the scheduler counts nanoseconds.
        """
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def has_mapped(self, name: str) -> bool:
        """Return whether a library of that name is loaded into the process."""
        return name in Path(f"/proc/{self.pid}/maps").read_text()

    def end(self) -> None:
        """Quit, or end the process if that does not help."""
        self.press(b"q")
        for _ in range(100):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                break
            self._read(0.02)
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, timeout: float) -> bytes:
        ready, _, _ = select.select([self._fd], [], [], timeout)
        if not ready:
            return b""
        try:
            data = os.read(self._fd, 1 << 20)
        except OSError:  # the process is gone
            return b""
        self.output = (self.output + data)[-1 << 16 :]
        self.n_bytes += len(data)
        return data
