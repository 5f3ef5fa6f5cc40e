"""The capture process seen from outside: start it, hear where its trace is, stop it.

We read what it prints, pass it on byte for byte, and send a copy back through the socket for the
trace. Not the process itself: code that prints while it holds the interpreter would wait for ever
for a reader of its own.
"""

from __future__ import annotations

import codecs
import importlib.util
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.signals import is_signal_exit_code
from flexinspect.records import protocol
from flexinspect.records.job import Job, ScriptJob

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
    return ScriptProcess(job, OutputRelay(hold=True), stdin=subprocess.DEVNULL)


class GenerationProcess(Capture):
    """One running capture of our own generation."""

    display_name: ClassVar[str] = "The capture process"

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            # -P: nothing from here
            [
                sys.executable,
                *python_debug_flags(job),
                "-P",
                "-m",
                "flexinspect_hooks.ensemble.capture_process",
            ],
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


MAX_HEAD_CHARS = 4 << 20
"""Characters of a program's output that its trace keeps from the beginning."""

MAX_TAIL_CHARS = 256 << 10
"""Characters that it keeps from the end, of what is longer."""

SEND_EVERY_S = 0.05
LINGER_S = 0.3
"""How long streams may be silent, once the program has ended, before we stop listening: what it
started may hold them open for ever."""

KILL_AFTER_INTERRUPTS = 4
"""Which Ctrl-C ends a program that takes no notice of those before it."""

_READ_BYTES = 1 << 16
_MERGE_WITHIN_S = 0.005
"""Seconds between two pieces of one stream that are stored as one."""

OutputItem = tuple[float, str, str]


class OutputRelay:
    """Where a program's output goes: out as it comes, or, while `held`, out when it is released."""

    def __init__(self, *, hold: bool, stdout: int = 1, stderr: int = 2) -> None:
        self._targets = {"stdout": stdout, "stderr": stderr}
        self._held: deque[tuple[str, bytes]] | None = deque() if hold else None
        self._n_held = self._n_dropped = 0
        self._lock = threading.Lock()

    def write(self, stream: str, piece: bytes) -> bool:
        """Pass a piece on; False when nobody reads that stream any more."""
        with self._lock:
            if self._held is None:
                return self._write(stream, piece)
            self._held.append((stream, piece))
            self._n_held += len(piece)
            while self._n_held > MAX_HEAD_CHARS:
                dropped = len(self._held.popleft()[1])
                self._n_held, self._n_dropped = self._n_held - dropped, self._n_dropped + dropped
            return True

    def release(self) -> None:
        """Print what was held, and hold nothing from here on."""
        with self._lock:
            held, self._held = self._held, None
            if self._n_dropped:
                print(f"flexinspect: {self._n_dropped} bytes before this are not shown", flush=True)
            for stream, piece in held or ():
                self._write(stream, piece)

    def _write(self, stream: str, piece: bytes) -> bool:
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._targets[stream], left) :]
        except OSError:
            return False
        return True


class OutputRecorder:
    """The copy of a program's output that is sent back for its trace, in a thread of its own."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("replace") for name in ("stdout", "stderr")}
        self._unsent: list[OutputItem] = []
        self._tail: deque[OutputItem] = deque()
        self._n_kept = self._n_tail = self._n_left_out = 0
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._send_lock = threading.Lock()
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, stream: str, piece: bytes, *, final: bool = False) -> None:
        """Take a piece as it was read."""
        text = self._decoders[stream].decode(piece, final)
        if not text:
            return
        item = (time.time(), stream, text)
        with self._lock:
            if self._n_kept < MAX_HEAD_CHARS:
                self._n_kept += len(text)
                _append_merged(self._unsent, item)
            else:
                self._add_to_tail(item)
        self._wake.set()

    def _add_to_tail(self, item: OutputItem) -> None:
        self._tail.append(item)
        self._n_tail += len(item[2])
        while self._n_tail > MAX_TAIL_CHARS and len(self._tail) > 1:
            n = len(self._tail.popleft()[2])
            self._n_tail, self._n_left_out = self._n_tail - n, self._n_left_out + n

    def finish(self) -> None:
        """Send the rest, with what had to be left out, and say that this is all."""
        for stream in self._decoders:
            self.add(stream, b"", final=True)
        self._is_finished = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_finished:
            self._wake.wait()
            if not self._is_finished:
                time.sleep(SEND_EVERY_S)
            self._wake.clear()
            if not self._send(self._take_items()):
                return
        self._send(self._take_items(last=True))
        self._send_message(protocol.DRAINED)

    def _take_items(self, *, last: bool = False) -> list[OutputItem]:
        with self._lock:
            items, self._unsent = self._unsent, []
            if last and self._n_left_out:
                text = f"… {self._n_left_out} characters are left out here …\n"
                items.append((self._tail[0][0], self._tail[0][1], text))
            return [*items, *self._tail] if last else items

    def _send(self, items: list[OutputItem]) -> bool:
        return not items or self._send_message(protocol.OUTPUT, items=items)

    def _send_message(self, kind: str, **facts: Any) -> bool:
        try:
            with self._send_lock:
                self._control.sendall((protocol.format_message(kind, **facts) + "\n").encode())
        except OSError:
            return False
        return True

    def grant_terminal(self) -> None:
        """Say that pdb may have the terminal."""
        self._send_message(protocol.TERMINAL, wanted=True)


def _append_merged(items: list[OutputItem], item: OutputItem) -> None:
    """Add a piece, to the one before it if both came of one stream at one time."""
    if items and items[-1][1] == item[1] and item[0] - items[-1][0] < _MERGE_WITHIN_S:
        at, stream, text = items[-1]
        items[-1] = (at, stream, text + item[2])
    else:
        items.append(item)


class ScriptProcess(Capture):
    """A user's program in the capture process; its standard streams are its own.

    `stdin` is that of this process when it is None.
    """

    display_name: ClassVar[str] = "The program"
    has_own_streams: ClassVar[bool] = True

    def __init__(self, job: ScriptJob, relay: OutputRelay, *, stdin: int | None = None) -> None:
        super().__init__()
        self._relay = relay
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *python_debug_flags(job), _entry_script(), str(theirs.fileno())],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                bufsize=0,
            )
        ours.sendall((job.to_json() + "\n").encode())
        self._control, self._partial_line = ours, b""
        self._recorder = OutputRecorder(ours)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit code once the program has ended and all it printed was passed on."""
        code = self._process.poll()
        return None if self._reader.is_alive() else code

    def signal(self, number: int) -> None:
        """Send a signal to the program; Ctrl-C to all processes of it, as a terminal does."""
        if self._process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def grant_terminal(self) -> None:
        """Let pdb have the terminal."""
        self._recorder.grant_terminal()

    def show_output(self) -> None:
        """Print what was held while the interface was open."""
        self._relay.release()

    def _read(self) -> None:
        """Pass everything on until the program has ended and nothing more comes."""
        with selectors.DefaultSelector() as ready:
            for name in ("stdout", "stderr"):
                ready.register(getattr(self._process, name), selectors.EVENT_READ, name)
            ready.register(self._control, selectors.EVENT_READ, "control")
            while ready.get_map():
                found = ready.select(LINGER_S)
                if not found and self._process.poll() is not None:
                    return
                # The streams before the control: what was printed before a word came before it.
                for key, _ in sorted(found, key=lambda pair: pair[0].data == "control"):
                    self._on_readable(ready, key.fileobj, key.data)
        self._process.wait()

    def _on_readable(self, ready: selectors.BaseSelector, source: Any, name: str) -> None:
        is_open = (
            self._read_messages(ready) if name == "control" else self._relay_output(source, name)
        )
        if not is_open:
            ready.unregister(source)
            source.close()

    def _relay_output(self, source: IO[bytes], name: str) -> bool:
        piece = os.read(source.fileno(), _READ_BYTES)
        self._recorder.add(name, piece)
        if name == "stderr":
            self._stderr.extend(piece.decode(errors="backslashreplace").splitlines())
        return bool(piece) and self._relay.write(name, piece)

    def _read_messages(self, ready: selectors.BaseSelector) -> bool:
        try:
            piece = self._control.recv(_READ_BYTES)
        except OSError:
            piece = b""
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        for line in lines:
            facts = protocol.parse_message(line.decode())
            if facts is None:
                continue
            if facts["kind"] == protocol.DRAIN:
                self._drain(ready)
            self._on_message(facts)
        return bool(piece)

    def _drain(self, ready: selectors.BaseSelector) -> None:
        """Take what lies in the streams by now, then tell the trace that this was all."""
        while found := [key for key, _ in ready.select(0) if key.data != "control"]:
            for key in found:
                self._on_readable(ready, key.fileobj, key.data)
        self._recorder.finish()


def forward_signals(process: Capture) -> None:
    """Let the program have the signals that are sent to us in its place, until it has ended."""
    n_interrupts = 0

    def hand_on(number: int, frame: object) -> None:
        nonlocal n_interrupts
        n_interrupts += number == signal.SIGINT
        if process.poll() is not None:
            raise KeyboardInterrupt
        if n_interrupts >= KILL_AFTER_INTERRUPTS:
            process.kill()
        else:
            process.signal(number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hand_on)


def _entry_script() -> str:
    """Return the file that runs a program under capture, without loading anything of it."""
    spec = importlib.util.find_spec("flexinspect_hooks")
    if spec is None or not spec.submodule_search_locations:
        raise FlexInspectError(
            "The package flexinspect_hooks, which captures, is not there.",
            hint="flexinspect is not installed whole in this Python: install it again.",
        )
    return str(Path(spec.submodule_search_locations[0], "user_code", "script", "script_process.py"))


POLL_INTERVAL_S = 0.05


def hand_over_terminal(process: Capture) -> None:
    """Let pdb have the terminal until it is done with it, or its process has ended.

    Nothing else may read from the terminal or draw on it meanwhile. Ctrl-C goes to pdb. Call it
    from the main thread.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: process.interrupt())
    try:
        n_granted = 0
        while process.state.wants_terminal and process.poll() is None:
            if (
                n_granted != process.state.n_terminal_requests
            ):  # it may want it again between two looks
                n_granted = process.state.n_terminal_requests
                process.grant_terminal()
            time.sleep(POLL_INTERVAL_S)
    finally:
        signal.signal(signal.SIGINT, before)
