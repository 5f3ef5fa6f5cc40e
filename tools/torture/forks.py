"""Children of a process that has everything imported: a millisecond each instead of a second."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

LIMIT_S = 60.0
"""How long a child may take before it counts as hanging."""
NOBODY = 65534

Tell = Callable[[str], None]
"""Tells the parent, in one line, what has been done."""


class Child:
    """A forked process that runs `body`; it tells its parent what it has done through a pipe.

    `lines` is what it has told so far.
    """

    def __init__(self, body: Callable[[Tell], None]) -> None:
        self._pipe, inner = os.pipe()
        self._rest = b""
        self.lines: list[str] = []
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _run(body, inner)
        os.close(inner)

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait_for(self, line: str, limit_s: float = LIMIT_S) -> bool:
        """Wait until the child has told `line`; return False if it ended or hangs before."""
        until = time.monotonic() + limit_s
        while line not in self.lines:
            if not self._read(until):
                return False
        return True

    def finish(self, limit_s: float = LIMIT_S) -> str:
        """Wait for the end; return "" or how it ended: "killed", "hangs", an exception."""
        until = time.monotonic() + limit_s
        while self._read(until):
            pass
        hangs = time.monotonic() >= until
        if hangs:
            self.send(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pipe)
        if hangs:
            return "hangs"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "killed" if number == signal.SIGKILL else signal.Signals(number).name
        raised = [line for line in self.lines if line.startswith("raised ")]
        return "" if status == 0 else (raised or [f"exit status {status}"])[-1]

    def _read(self, until: float) -> bool:
        """Read what comes next; return False at the end of the pipe, or of the time."""
        left = max(until - time.monotonic(), 0)
        if not select.select([self._pipe], [], [], left)[0]:
            return False
        data = os.read(self._pipe, 1 << 16)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in whole]
        return bool(data)


def _run(body: Callable[[Tell], None], pipe: int) -> NoReturn:
    def tell(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    status = 1
    try:
        body(tell)
        status = 0
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "flexinspect" in frame.filename][-1:]
        place = "".join(f" at {Path(own.filename).name}:{own.lineno}" for own in own)
        sentence = " ".join(str(error).split())[:300]
        tell(f"raised {type(error).__name__}: {sentence}{place}")
    finally:
        os._exit(status)


class Outcome(Struct, frozen=True):
    """How a child ended, and what it told."""

    end: str
    lines: tuple[str, ...]


def run_child(body: Callable[[Tell], None], limit_s: float = LIMIT_S) -> Outcome:
    """Run a child to its end."""
    child = Child(body)
    return Outcome(child.finish(limit_s), tuple(child.lines))


def highest_descriptor() -> int:
    """Return the highest descriptor that is open in this process."""
    return max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def become_nobody() -> None:
    """Give up the rights of the superuser, who may write everywhere."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
