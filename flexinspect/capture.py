"""The capture process seen from outside: start it, hear where its trace is, stop it."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from flexinspect import protocol
from flexinspect.ending import is_signal_exit_code
from flexinspect.job import Job, ScriptJob

MAX_STDERR_LINES = 40
"""Lines of the process's stderr that are kept."""


@dataclass(slots=True)
class CaptureState:
    """What the process has said so far."""

    path: Path | None = None
    recording: Path | None = None
    note: str | None = None
    error: str | None = None
    hint: str | None = None
    is_over: bool = False
    wants_terminal: bool = False
    n_terminal_requests: int = 0
    pauses: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    debugger_messages: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    prints: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


class Capture:
    """A process that captures, in a process group of its own; `CaptureProcess` is one.

    Ctrl-C in the terminal reaches us alone; `interrupt` hands it on, so that the process can end
    its trace, and `kill` ends it whatever it does.
    """

    display_name: ClassVar[str]
    """What it is in a sentence."""

    has_own_streams: ClassVar[bool] = False
    """Whether stdout, signals and exit code are a user's program's own."""

    _process: subprocess.Popen[Any]

    def __init__(self) -> None:
        self.state = CaptureState()
        self.was_killed = False
        """Whether we ended it at once."""
        self._stderr: deque[str] = deque(maxlen=MAX_STDERR_LINES)

    @property
    def pid(self) -> int:
        """Process id of the capture."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code once the process has ended and all it said has been heard."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ask the process to end its generation and its trace."""
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once; its trace holds every finished step."""
        if self._process.poll() is None:
            self.was_killed = True
            self._process.kill()

    def detach(self) -> bool:
        """Let the process go on when we end; False where that cannot be."""
        return False

    def show_output(self) -> None:
        """The interface is closed: print what was printed meanwhile, and go on with it."""

    def last_stderr_lines(self) -> list[str]:
        """Return the last lines of the process's stderr."""
        return list(self._stderr)

    def describe_exit(self, code: int) -> str:
        """Say in words how the process ended, for an exit that nobody explained."""
        if not self.has_own_streams and is_signal_exit_code(code):
            code = 128 - code
        if code >= 0:
            return f"{self.display_name} ended with exit code {code}."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        extra = " (out of memory, or ended by hand)" if name == "SIGKILL" else ""
        return f"{self.display_name} was ended by {name}{extra}."

    def _on_message(self, facts: Mapping[str, Any]) -> None:
        """Take in what the process says of its trace."""
        if facts["kind"] == protocol.TRACE:
            self.state.path = Path(facts["path"])
            self.state.note = facts["note"]
            self.state.recording = Path(facts["recording"])
        elif facts["kind"] == protocol.ERROR:
            self.state.error, self.state.hint = facts["message"], facts["hint"]
        elif facts["kind"] == protocol.FINISHED:
            self.state.path = Path(facts["path"]) if facts["path"] else None
            self.state.note = facts["note"] or self.state.note
            self.state.is_over = True
        elif facts["kind"] == protocol.DEBUGGER:
            self.state.debugger_messages.put(facts["text"])
        elif facts["kind"] == protocol.TERMINAL:
            self.state.wants_terminal = facts["wanted"]
            self.state.n_terminal_requests += facts["wanted"]
        elif facts["kind"] == protocol.STOPPED:
            self.state.pauses.put(facts["text"])

    def grant_terminal(self) -> None:
        """Let pdb in the process have the terminal, until `state.wants_terminal` is over."""
        raise NotImplementedError


def python_debug_flags(job: Job | ScriptJob) -> list[str]:
    """Return the flags of Python without which debugpy warns that it may miss breakpoints."""
    is_debugged = job.debugger.port is not None or "pydevd" in sys.modules
    return ["-X", "frozen_modules=off"] if is_debugged else []


def start_capture(job: Job | ScriptJob) -> Capture:
    """Start a job in a process of its own, for an interface that has the terminal to itself.

    What a user's program prints is held until `show_output`, and its stdin is empty.
    """
    if isinstance(job, Job):
        return GenerationProcess(job)
    from flexinspect.scriptcapture import OutputRelay, ScriptProcess

    return ScriptProcess(job, OutputRelay(hold=True), stdin=subprocess.DEVNULL)


class GenerationProcess(Capture):
    """One running capture of our own generation."""

    display_name: ClassVar[str] = "The capture process"

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            # -P: nothing from here
            [sys.executable, *python_debug_flags(job), "-P", "-m", "flexinspect_hooks.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._send_job(job)

    def _send_job(self, job: Job) -> None:
        assert self._process.stdin is not None
        try:
            # Left open: that it ends is how the process learns that we are gone.
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its exit code and last words tell why

    def detach(self) -> bool:
        """Let the process go on when we end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(protocol.DETACH.decode())
            self._process.stdin.close()
        except (BrokenPipeError, ValueError):
            return False  # it has just ended
        return True

    def poll(self) -> int | None:
        """Return the exit code once the process has ended, all it said has been heard."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(timeout=0.5)  # a grandchild may hold them open for ever
        return code

    def grant_terminal(self) -> None:
        """Let pdb have the terminal: any byte tells the process so."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(protocol.GRANT_TERMINAL.decode())
            self._process.stdin.flush()

    def _read_stdout(self, stream: IO[str]) -> None:
        for line in stream:
            facts = protocol.parse_message(line)
            if facts is None:
                self.state.prints.put(line.rstrip("\n"))
            else:
                self._on_message(facts)

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            self._stderr.append(line.rstrip("\n"))
