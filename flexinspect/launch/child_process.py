"""Start, follow and stop the capture process, for the interface and for plain output.

The output of a user's program is read here, passed on byte for byte, and sent back through a
socket for the trace. The capture process cannot read its own output: code that prints while it
holds the GIL would wait for ever for the thread that reads.
"""

from __future__ import annotations

import codecs
import importlib.util
import os
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
from pathlib import Path
from typing import IO, Any, ClassVar

from msgspec import Struct, field

from flexinspect.core.errors import UsageError
from flexinspect.core.signals import is_signal_exit_code
from flexinspect.records import protocol
from flexinspect.records.job import Job, ScriptJob

POLL_INTERVAL_S = 0.05

MAX_STDERR_LINES = 40
"""Last lines of a process's stderr that are kept for error messages."""

MAX_PRINTS = 1 << 16
"""Last lines that the user's code printed in our own generation, kept until they are shown."""

MAX_HEAD_CHARS = 4 << 20
"""Characters stored in the trace from the beginning of a program's output."""

MAX_TAIL_CHARS = 256 << 10
"""Characters stored from the end of a longer output."""

SEND_EVERY_S = 0.05
LINGER_S = 0.3
"""How long the streams may be silent after the program has ended before reading stops.

A process that the program has started may keep them open for ever.
"""

KILL_AFTER_INTERRUPTS = 4
"""Number of the Ctrl-C that kills a program which ignored the ones before it."""

_READ_BYTES = 1 << 16
_MERGE_WITHIN_S = 0.005
"""Maximum time between two pieces of a stream that are stored as one."""


class CaptureState(Struct):
    """What the process has reported so far: its trace, errors, requests and printed lines."""

    path: Path | None = None
    recording: Path | None = None
    note: str | None = None
    error: str | None = None
    hint: str | None = None
    is_over: bool = False
    wants_terminal: bool = False
    n_terminal_requests: int = 0
    pauses: deque[str] = field(default_factory=deque)
    debugger_messages: deque[str] = field(default_factory=deque)
    prints: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_PRINTS))


class Capture:
    """A capture process in its own session; `GenerationProcess` and `ScriptProcess` implement it.

    Ctrl-C in the terminal reaches only the parent. `interrupt` passes it on, so that the process
    can finish its trace; `kill` ends it immediately.
    """

    display_name: ClassVar[str]
    """The subject of sentences about it."""

    has_own_streams: ClassVar[bool] = False
    """Whether stdout, signals and the exit code belong to a user's program."""

    _process: subprocess.Popen[Any]

    def __init__(self) -> None:
        self.state = CaptureState()
        self.was_killed = False
        """Whether `kill` ended it."""
        self._stderr: deque[str] = deque(maxlen=MAX_STDERR_LINES)

    @property
    def pid(self) -> int:
        """Process id of the capture."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code once the process has ended and all its output has been read."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ask the process to end its generation and finish its trace."""
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send a signal to the process; SIGINT to all processes of a program, as terminals do."""
        if self._process.poll() is None:
            if self.has_own_streams and number == signal.SIGINT:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process; its trace has every finished step."""
        if self._process.poll() is None:
            self.was_killed = True
            self._process.kill()

    def detach(self) -> bool:
        """Let the process continue after the parent has ended; False where that is impossible."""
        return False

    def show_output(self) -> None:
        """Print the output held while the interface was open, and pass on further output."""

    def last_stderr_lines(self) -> list[str]:
        """Return the last lines of the process's stderr, at most `MAX_STDERR_LINES`."""
        return list(self._stderr)

    def describe_exit(self, code: int) -> str:
        """Return a sentence about an exit code, for a process that reported no error."""
        if not self.has_own_streams and is_signal_exit_code(code):
            code = 128 - code
        if code >= 0:
            return f"{self.display_name} ended with exit code {code}."
        name = signal_name(code) or f"signal {-code}"
        extra = " (out of memory, or ended by hand)" if name == "SIGKILL" else ""
        return f"{self.display_name} was ended by {name}{extra}."

    def _on_message(self, facts: Mapping[str, Any]) -> None:
        kind, state = facts["kind"], self.state
        if kind == protocol.TRACE:
            state.path, state.note = Path(facts["path"]), facts["note"]
            state.recording = Path(facts["recording"])
        elif kind == protocol.ERROR:
            state.error, state.hint = facts["message"], facts["hint"]
        elif kind == protocol.FINISHED:
            state.path = Path(facts["path"]) if facts["path"] else None
            state.note = facts["note"] or state.note
            state.is_over = True
        elif kind == protocol.DEBUGGER:
            state.debugger_messages.append(facts["text"])
        elif kind == protocol.TERMINAL:
            state.wants_terminal = facts["wanted"]
            state.n_terminal_requests += facts["wanted"]
        elif kind == protocol.STOPPED:
            state.pauses.append(facts["text"])

    def grant_terminal(self) -> None:
        """Allow pdb in the process to use the terminal while `state.wants_terminal` is set."""
        raise NotImplementedError


def signal_name(code: int) -> str:
    """Return the name of the signal that an exit code stands for, empty for any other code."""
    return signal.Signals(-code).name if -code in set(signal.Signals) else ""


def _python_command(job: Job | ScriptJob, *arguments: str) -> list[str]:
    # debugpy misses breakpoints in frozen modules.
    is_debugged = job.debugger.port is not None or "pydevd" in sys.modules
    flags = ["-X", "frozen_modules=off"] if is_debugged else []
    return [sys.executable, *flags, *arguments]


def start_capture(job: Job | ScriptJob) -> Capture:
    """Start a job in its own process, for an interface that uses the terminal."""
    return GenerationProcess(job) if isinstance(job, Job) else ScriptProcess(job, hold=True)


class GenerationProcess(Capture):
    """The capture process of our own generation."""

    display_name: ClassVar[str] = "The capture process"

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            # -P: no module of the current folder is imported
            _python_command(job, "-P", "-m", "flexinspect_hooks.ensemble.capture_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_stdout, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()
        # Left open: the process learns from its end that the parent is gone.
        with suppress(BrokenPipeError):  # it died at once; its exit code and stderr show why
            self._write(job.to_json() + "\n")

    def _write(self, text: str) -> None:
        self._stdin.write(text)
        self._stdin.flush()

    def detach(self) -> bool:
        """Let the process continue after the parent has ended."""
        try:
            self._write(protocol.DETACH.decode())
            self._stdin.close()
        except (BrokenPipeError, ValueError):
            return False  # it has just ended
        return True

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(timeout=0.5)  # a grandchild may keep the streams open for ever
        return code

    def grant_terminal(self) -> None:
        with suppress(OSError, ValueError):
            self._write(protocol.GRANT_TERMINAL.decode())

    def _read_stdout(self) -> None:
        for line in self._process.stdout or ():
            facts = protocol.parse_message(line)
            if facts is None:
                self.state.prints.append(line.rstrip("\n"))
            else:
                self._on_message(facts)

    def _read_stderr(self) -> None:
        self._stderr.extend(line.rstrip("\n") for line in self._process.stderr or ())


OutputItem = tuple[float, str, str]
"""When a piece of output was read, the name of its stream, and its text."""


class OutputRecorder:
    """Sends a copy of a program's output back for its trace, in its own thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("replace") for name in ("stdout", "stderr")}
        self._unsent: list[OutputItem] = []
        self._tail: deque[OutputItem] = deque()
        self._n_kept = self._n_tail = self._n_left_out = 0
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._wake, self._is_finished = threading.Event(), False
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, stream: str, piece: bytes, *, final: bool = False) -> None:
        """Add a piece of a stream, as it was read."""
        text = self._decoders[stream].decode(piece, final)
        if not text:
            return
        now = time.time()
        with self._lock:
            if self._n_kept < MAX_HEAD_CHARS:
                self._n_kept += len(text)
                last_at, last_stream, last_text = self._unsent[-1] if self._unsent else (0, "", "")
                if stream == last_stream and now - last_at < _MERGE_WITHIN_S:
                    self._unsent[-1] = (last_at, stream, last_text + text)
                else:
                    self._unsent.append((now, stream, text))
            else:
                self._tail.append((now, stream, text))
                self._n_tail += len(text)
            while self._n_tail > MAX_TAIL_CHARS and len(self._tail) > 1:
                n = len(self._tail.popleft()[2])
                self._n_tail, self._n_left_out = self._n_tail - n, self._n_left_out + n
        self._wake.set()

    def finish(self) -> None:
        """Send the rest, the number of omitted characters, and the message that this is all."""
        for stream in self._decoders:
            self.add(stream, b"", final=True)
        self._is_finished = True
        self._wake.set()

    def _run(self) -> None:
        is_connected = True
        while is_connected and not self._is_finished:
            self._wake.wait()
            if not self._is_finished:
                time.sleep(SEND_EVERY_S)  # the pieces of one line arrive within that time
            self._wake.clear()
            is_connected = self._send_items()
        if is_connected and self._send_items(last=True):
            self.send(protocol.DRAINED)

    def _send_items(self, *, last: bool = False) -> bool:
        with self._lock:
            items, self._unsent = self._unsent, []
            if last and self._n_left_out:
                text = f"… {self._n_left_out} characters are left out here …\n"
                items.append((*self._tail[0][:2], text))
            items += self._tail if last else ()
        return not items or self.send(protocol.OUTPUT, items=items)

    def send(self, kind: str, **facts: Any) -> bool:
        """Send a message to the program; False when it is gone."""
        try:
            with self._send_lock:
                self._control.sendall((protocol.format_message(kind, **facts) + "\n").encode())
        except OSError:
            return False
        return True


class ScriptProcess(Capture):
    """The capture process of a user's program, which keeps its own standard streams.

    With `hold`, for an interface that uses the terminal, its output is kept until `show_output`,
    and its stdin is empty. `stdout` is the file descriptor that gets what it prints.
    """

    display_name: ClassVar[str] = "The program"
    has_own_streams: ClassVar[bool] = True

    def __init__(self, job: ScriptJob, *, hold: bool = False, stdout: int = 1) -> None:
        super().__init__()
        self._targets = {"stdout": stdout, "stderr": 2}
        self._held: deque[tuple[str, bytes]] | None = deque() if hold else None
        self._n_held = self._n_dropped = 0
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _python_command(job, _entry_script(), str(theirs.fileno())),
                stdin=subprocess.DEVNULL if hold else None,
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
        code = self._process.poll()
        return None if self._reader.is_alive() else code

    def grant_terminal(self) -> None:
        self._recorder.send(protocol.TERMINAL, wanted=True)

    def show_output(self) -> None:
        with self._lock:
            held, self._held = self._held, None
            if self._n_dropped:
                print(f"flexinspect: {self._n_dropped} bytes before this are not shown", flush=True)
            for stream, piece in held or ():
                self._write(stream, piece)

    def _read(self) -> None:
        """Read and pass on all streams until the program has ended and nothing more arrives."""
        with selectors.DefaultSelector() as selector:
            for name in ("stdout", "stderr"):
                selector.register(getattr(self._process, name), selectors.EVENT_READ, name)
            selector.register(self._control, selectors.EVENT_READ, "control")
            while selector.get_map():
                # Before the wait: a program that ends after it has printed more meanwhile.
                has_ended = self._process.poll() is not None
                events = selector.select(LINGER_S)
                if not events and has_ended:
                    return
                # Streams before messages: what was printed before a message is read before it.
                for key, _ in sorted(events, key=lambda event: event[0].data == "control"):
                    self._on_readable(selector, key.fileobj, key.data)
        self._process.wait()

    def _on_readable(self, selector: selectors.BaseSelector, source: Any, name: str) -> None:
        is_control = name == "control"
        if not (self._read_messages(selector) if is_control else self._relay_output(source, name)):
            selector.unregister(source)
            source.close()

    def _relay_output(self, source: IO[bytes], name: str) -> bool:
        piece = os.read(source.fileno(), _READ_BYTES)
        self._recorder.add(name, piece)
        if name == "stderr":
            self._stderr.extend(piece.decode(errors="backslashreplace").splitlines())
        with self._lock:
            if self._held is None:
                return bool(piece) and self._write(name, piece)
            self._held.append((name, piece))
            self._n_held += len(piece)
            while self._n_held > MAX_HEAD_CHARS:
                dropped = len(self._held.popleft()[1])
                self._n_held, self._n_dropped = self._n_held - dropped, self._n_dropped + dropped
        return bool(piece)

    def _write(self, stream: str, piece: bytes) -> bool:
        """Pass a piece on; False when the stream has no reader any more."""
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._targets[stream], left) :]
        except OSError:
            return False
        return True

    def _read_messages(self, selector: selectors.BaseSelector) -> bool:
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
                self._drain(selector)
            self._on_message(facts)
        return bool(piece)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Read what is in the streams by now, then send the message that this was all."""
        while keys := [key for key, _ in selector.select(0) if key.data != "control"]:
            for key in keys:
                self._on_readable(selector, key.fileobj, key.data)
        self._recorder.finish()


def forward_signals(process: Capture) -> None:
    """Pass signals that are sent to this process on to the program, until it has ended."""
    n_interrupts = 0

    def forward(number: int, frame: object) -> None:
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
            signal.signal(number, forward)


def _entry_script() -> str:
    """Return the file that runs a program under capture, without importing its package."""
    spec = importlib.util.find_spec("flexinspect_hooks")
    if spec is None or not spec.submodule_search_locations:
        what = "The package flexinspect_hooks, which captures runs, was not found."
        hint = "The installation of flexinspect is incomplete: install it again."
        raise UsageError(what, hint=hint)
    return str(Path(spec.submodule_search_locations[0], "user_code", "script", "script_process.py"))


def hand_over_terminal(process: Capture) -> None:
    """Let pdb in the process use the terminal until it finishes or the process has ended.

    Nothing else may read from the terminal or draw on it meanwhile. Ctrl-C goes to pdb. Must be
    called from the main thread.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: process.interrupt())
    try:
        n_granted = 0
        while process.state.wants_terminal and process.poll() is None:
            n_requests = process.state.n_terminal_requests  # may grow between two polls
            if n_granted != n_requests:
                n_granted = n_requests
                process.grant_terminal()
            time.sleep(POLL_INTERVAL_S)
    finally:
        signal.signal(signal.SIGINT, before)
