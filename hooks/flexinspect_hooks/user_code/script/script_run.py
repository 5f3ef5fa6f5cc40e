"""Runs a user's program under capture: its trace, printed output, models and end.

This module does not import torch or transformers. When the program imports them, torch's settings
are applied and the `ModelFinder` is created.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from flexinspect.core.environment import command_path
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import print_message
from flexinspect.records import protocol
from flexinspect.records.job import ScriptJob
from flexinspect.records.step import OutputRecord
from flexinspect_hooks.breakpoints.actions import StoppedAtBreakpointError
from flexinspect_hooks.capture.new_trace import package_versions
from flexinspect_hooks.debugger.debugger_session import DebuggerSession
from flexinspect_hooks.python_internals import own_frames, torch_private
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.post_import_hooks import PostImportHooks
from flexinspect_hooks.python_internals.threads import background_thread
from flexinspect_hooks.sessions.captured_run import CapturedRun, send_error
from flexinspect_hooks.user_code import program

if TYPE_CHECKING:
    from flexinspect_hooks.user_code.model_discovery import ModelFinder

DRAIN_S = 5.0
"""How long the end waits for the last printed output, in seconds."""

_RUNNING = "running the program"
_PHASES = {"torch": "importing torch", "transformers.modeling_utils": "importing transformers"}


class ProgramCapture(CapturedRun):
    """Captures one program from its first line to its closed trace."""

    def __init__(self, job: ScriptJob, control: LauncherConnection) -> None:
        self.job, self._connection = job, control
        facts = {
            "program": {"name": job.program, "is_module": job.is_module, "args": list(job.args)},
            "declared": asdict(job.declaration),
        }
        debugging = DebuggerSession(job.debugger, control.send)
        super().__init__(job, "program", job.program, debugging, control.send, job.git, facts)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._stopped: StoppedAtBreakpointError | None = None
        self._drained = threading.Event()
        self._is_closing = False
        self._finder: ModelFinder | None = None
        self._finder_lock = threading.Lock()
        self._pending_calls: deque[str] = deque()
        self._has_own_traces = self._watches_trainings = False
        self._restore_optimizers: Callable[[], None] = lambda: None
        self._end_initializers: Callable[[], None] = lambda: None
        self.tokenizers = program.TokenizerTracker()

    def run(self) -> None:
        """Run the program; its exceptions propagate.

        The trace is closed at exit, as threads of the program may still use models.
        """
        self._children = program.ChildProcessCounter(self._on_fork)
        self._import_hooks = PostImportHooks(
            {
                "torch": self._on_torch,
                "torch.nn.attention.flex_attention": self._on_flex,
                "transformers.modeling_utils": self._on_transformers,
                "transformers.generation.utils": lambda: self._call_finder("watch_generate"),
                "transformers.tokenization_utils_base": self.tokenizers.watch,
                "flexinspect_hooks.user_code.watch_trace": self._on_watch,
                "multiprocessing.process": self._children.watch_multiprocessing,
            },
            on_import_begin=self._on_import_begin,
            on_error=self._on_import_error,
        )
        atexit.register(self._close)
        background_thread("flexinspect-control", self._read_messages).start()
        try:
            self._debugging.begin(self.writer.recording_path, self.record_event)
        except KeyboardInterrupt as error:  # it waited for a client
            self._error = error
            raise SystemExit(program.program_exit_code(error)) from None
        self.record_event("phase", _RUNNING)
        self._import_hooks.install()
        with suppress(AttributeError, ValueError, OSError):
            # At each line end, as on a terminal, so that the order of lines is kept.
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        try:
            program.run_program(self.job.program, self.job.args, is_module=self.job.is_module)
        except BaseException as error:
            self._on_program_error(error)
            if isinstance(error, KeyboardInterrupt):
                self._exit_if_stopped()
            own_frames.hide_own_frames_at_exit(error)
            raise
        self._exit_if_stopped()

    def _exit_if_stopped(self) -> None:
        """Exit with the exit code of a breakpoint, if one was hit that ends the run."""
        if self._finder is not None:
            self._finder.recorder.drain()
        stopped = self._stopped = self._breaks.stop_error()
        if stopped is not None:
            raise SystemExit(send_error(self._send, stopped)) from None

    def _call_finder(self, method: str) -> None:
        """Call a method of the finder by name; torch must be loaded.

        Importing the finder imports watched modules too: calls that are requested meanwhile, in
        this thread or another, are made when the finder exists.
        """
        self._pending_calls.append(method)
        # The thread that holds the lock makes the calls, and checks again after releasing it.
        while self._pending_calls and self._finder_lock.acquire(blocking=False):
            try:
                if self._finder is None:
                    from flexinspect_hooks.user_code.model_discovery import ModelFinder

                    self._finder = ModelFinder(self, self.job, self.tokenizers)
                if self._pending_calls:
                    getattr(self._finder, self._pending_calls.popleft())()
            finally:
                self._finder_lock.release()

    def _on_torch(self) -> None:
        import torch

        from flexinspect_hooks.loading.placement import device_report

        # Not with the first model, because a training may have none that is found.
        self.control.start()
        if self.job.threads is not None:
            torch.set_num_threads(self.job.threads)
        self._watch_optimizers()
        self._watch_initializers()
        self.update_manifest(versions=package_versions(), threads=torch.get_num_threads())
        self.record_event("phase", "note", text=device_report(opens_gpu=False))
        self.record_event("phase", _RUNNING)

    def _watch_optimizers(self) -> None:
        """Record trainings from the first optimizer on; most programs make none."""
        from torch.optim import Optimizer

        original = Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._is_closing or os.getpid() != self._pid:
                return
            try:
                if not self._watches_trainings:
                    self._watches_trainings = True
                    self._call_finder("watch_trainings")
                if self._finder is not None:
                    self._finder.add_optimizer(optimizer)
            except Exception as error:
                self._on_import_error("optimizers", error)

        self._restore_optimizers = patch(Optimizer, "__init__", init)

    def _watch_initializers(self) -> None:
        """Count what initializes each parameter, for trainings: it happens before the optimizer."""
        from flexinspect_hooks.python_internals.initializer_calls import count_initializations

        self._end_initializers = count_initializations()

    def _on_flex(self) -> None:
        self._call_finder("watch_standalone_calls")
        self._debugging.on_flex_attention(self.record_event)

    def _on_transformers(self) -> None:
        self.update_manifest(versions=package_versions())
        self._call_finder("watch_models")
        self.record_event("phase", _RUNNING)

    def _on_watch(self) -> None:
        from flexinspect_hooks.user_code.watch_trace import begin_callbacks

        begin_callbacks.append(self._on_own_trace)

    def _on_own_trace(self, path: Path) -> None:
        """Say where a `with` block of the program records, as it begins."""
        if os.getpid() != self._pid:
            return
        text = f"The program records itself. To see it: flexinspect open {command_path(path)}"
        self._has_own_traces = True
        self.record_event("own-trace", text, path=command_path(path))
        print_message(text)

    def _on_import_begin(self, name: str) -> None:
        if name in _PHASES:
            self.record_event("phase", _PHASES[name])

    def _on_import_error(self, name: str, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        self.record_event("not-recorded", f"The program's use of {name} is not recorded: {message}")

    # -- the launcher's messages -----------------------------------------------------------------

    def _read_messages(self) -> None:
        """Handle the launcher's messages; when the launcher is gone, end the program."""
        for facts in self._connection.messages():
            if facts["kind"] == protocol.OUTPUT:
                self._record_output(facts["items"])
            elif facts["kind"] == protocol.DRAINED:
                self._drained.set()
            elif facts["kind"] == protocol.TERMINAL:
                self._debugging.on_terminal_granted()
        if not self._is_closing:
            # In a process that a shell runs in the background, SIGINT is ignored.
            is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)
        self._drained.set()

    def _record_output(self, items: list[tuple[float, str, str]]) -> None:
        step_at = self._finder.step_at if self._finder is not None else lambda at: (None, None)
        records = [OutputRecord(stream, text, at, *step_at(at)) for at, stream, text in items]
        self._write_safely(lambda: self.writer.write_output(records))

    # -- the end ---------------------------------------------------------------------------------

    def _on_program_error(self, error: BaseException) -> None:
        self._error = error
        own_frames.strip_own_frames(error)
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._debugging.post_mortem(error)
        if self._finder is not None:
            self._finder.on_program_failed(error)
        elif not isinstance(error, SystemExit):
            self.record_error(error)

    def _close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._is_closing = True
        self.control.close()
        self.end_observation()
        if self._finder is not None and isinstance(self._error, KeyboardInterrupt):
            self._finder.audits = None  # who interrupts a program wants it to end
        cost = self._finder.close() if self._finder is not None else None
        self.report_missing_steps()
        self._import_hooks.remove()
        self._restore_optimizers()
        self._end_initializers()
        self.tokenizers.end()
        self._children.end()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        self._send(protocol.DRAIN)
        self._drained.wait(DRAIN_S)  # until all printed output is in the trace
        self._report_unrecorded()
        if cost is not None:
            self.update_manifest(cost=cost)
        code = self._stopped.exit_code if self._stopped else program.program_exit_code(self._error)
        self.update_manifest(exit_code=code)
        self._write_safely(lambda: self.writer.close(program.end_state(self._error)))
        self._send(protocol.FINISHED, path=str(self.writer.path), note=self._note())

    def _report_unrecorded(self) -> None:
        if n := self._children.n:
            were = "child process was" if n == 1 else "child processes were"
            text = f"{n} {were} started; what runs there is not recorded."
            self.record_event("not-recorded", text, n=n)
        has_found = self._finder is not None and self._finder.has_found_anything
        # A program that failed or was interrupted needs no advice on what to record.
        if (
            not has_found
            and not self._has_own_traces
            and program.end_state(self._error) == "finished"
        ):
            self.record_event("not-recorded", _nothing_recorded())

    def _note(self) -> str | None:
        if self._finder is None:
            return self.writer.note
        from flexinspect_hooks.capture.recorder import recording_error  # it imports torch

        failure = recording_error(self._finder.recorder, self.writer)
        return failure.sentence() if failure is not None else self.writer.note

    def _on_fork(self) -> None:
        """Remove all hooks in a forked child, because the trace belongs to its parent."""
        self.control.close_sockets()
        self._import_hooks.remove()
        self._restore_optimizers()
        self._end_initializers()
        self.tokenizers.end()
        self._children.end()
        if self._finder is not None:
            self._finder.discard()


def _nothing_recorded() -> str:
    """Say why no model was recorded, and how to record what the program does."""
    if "torch" not in sys.modules:
        return "Nothing was recorded: the program did not import torch."
    training = "flexinspect.watch_training(model, optimizer, out=…), see docs/training.md"
    if torch_private.has_made_optimizer():
        return (
            f"No step of a torch optimizer was seen. To record another training: with {training}."
        )
    reason = "the program did not use transformers' models"
    if "transformers.modeling_utils" in sys.modules:
        reason = "none was called in this process, or only inside a graph that torch.compile made"
    return (
        f"No transformers model was found: {reason}. To record text generation: "
        f"with flexinspect.watch(model). To record a training: with {training}."
    )


def main(number: int) -> int:
    """Run the job of the socket with this descriptor; return the exit code, unless it exits."""
    control = LauncherConnection(number)
    try:
        run = ProgramCapture(ScriptJob.from_json(control.first_line()), control)
    except FlexInspectError as error:
        return send_error(control.send, error)
    run.run()
    return 0


class LauncherConnection:
    """The socket to the launcher, with lines of the protocol in both directions."""

    def __init__(self, number: int) -> None:
        os.set_inheritable(number, False)
        self._socket = socket(fileno=number)
        self._send_lock = threading.Lock()
        self._lines = self._read()

    def first_line(self) -> str:
        """Return the first line: the job as JSON."""
        return next(self._lines, b"").decode()

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the message of each line until the launcher closes its side."""
        for line in self._lines:
            facts = protocol.parse_message(line.decode())
            if facts is not None:
                yield facts

    def _read(self) -> Iterator[bytes]:
        """Yield each line, read without a buffered file: a daemon thread must not hold its lock."""
        rest = b""
        with suppress(OSError):
            while piece := self._socket.recv(1 << 20):
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; errors are ignored, because the launcher may be gone."""
        with suppress(OSError), self._send_lock:
            self._socket.sendall((protocol.format_message(kind, **facts) + "\n").encode())
