"""The command `flexinspect`, whose processes are forked from one that has torch loaded.

    done = warm_command("run", "--json", cwd=folder)

goes the way of `python -m flexinspect run --json` in that folder, with its capture process: all but
the seconds in which each of many runs would import torch and transformers. Signals, terminals and
what a fresh interpreter loads are for tests that start one.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from flexinspect.launch import child_process
from support.forks import warm


def warm_command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, without a terminal and without the hub."""
    ran = warm().run("-m", "support.warm", *words, cwd=cwd)
    return subprocess.CompletedProcess(["flexinspect", *words], ran.code, ran.out, ran.err)


class ForkedCapture:
    """A capture process of our own generation, as `subprocess.Popen` would show it."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        assert command[-2:] == ["-m", "flexinspect_hooks.ensemble.capture_process"], command
        assert options["start_new_session"]
        ends = [os.pipe() for _ in range(3)]
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            _become_capture([ends[0][0], ends[1][1], ends[2][1]])
        for end in (ends[0][0], ends[1][1], ends[2][1]):
            os.close(end)
        self.stdin: IO[str] = os.fdopen(ends[0][1], "w", encoding="utf-8")
        self.stdout, self.stderr = (
            os.fdopen(end, encoding="utf-8", errors="backslashreplace")
            for end in (ends[1][0], ends[2][0])
        )

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code once it has ended."""
        return self._wait(0)

    def _wait(self, flags: int) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, flags)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _become_capture(streams: Sequence[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1024)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
        from flexinspect_hooks.ensemble.capture_process import main

        atexit._clear()  # those are the command's
        code = main()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _main() -> int:
    from flexinspect.__main__ import main

    child_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        **{**vars(subprocess), "Popen": ForkedCapture}
    )
    return main()


if __name__ == "__main__":
    sys.exit(_main())
