"""A run that `flexinspect run` started: its trace, control, breakpoints, and recording level.

This module is imported before the program of the user, so it does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flexinspect.control import messages
from flexinspect.control.discovery import ServeOptions
from flexinspect.core.errors import FlexInspectError, TraceWriteError
from flexinspect.core.rank_environment import rank_facts, rank_of_environment
from flexinspect.records import protocol
from flexinspect.records.job import Job, ScriptJob
from flexinspect.records.step import EventRecord
from flexinspect_hooks.breakpoints.actions import RunBreakpoints
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.capture.failure_facts import failure_facts
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.control.control_protocols import ControlTargets, SessionLevels
from flexinspect_hooks.control.server import CaptureControl
from flexinspect_hooks.debugger.debugger_session import DebuggerSession, SendMessage

if TYPE_CHECKING:
    from flexinspect_hooks.capture.recorder import Recorder
    from flexinspect_hooks.sessions.capture_session import CaptureSession
    from flexinspect_hooks.step_writer.size_limit import SizeLimit


class CapturedRun:
    """Opens the trace of a job, with `git` and `facts` in its manifest; `send` reports its path.

    Raises `FlexInspectError`, without a trace, for an address that cannot be served and for an
    invalid breakpoint.
    """

    def __init__(
        self,
        job: Job | ScriptJob,
        kind: messages.Kind,
        title: str,
        debugging: DebuggerSession,
        send: SendMessage,
        git: Any,
        facts: Mapping[str, Any],
    ) -> None:
        self._debugging, self._send = debugging, send
        self._max_size = job.max_size
        self._size_limit: SizeLimit | None = None
        self.generation = 0
        """The generation that runs, for findings about what ended it."""
        facts = {**facts, "graphs_counted": True, **rank_facts(rank_of_environment())}
        self.writer = create_trace(
            job.out, job.argv, job.level, git, overwrite=job.overwrite, **facts
        )
        path, recording = str(self.writer.path), str(self.writer.recording_path)
        self.levels = SessionLevels(job.level, job.layers)
        targets = ControlTargets(kind, title, recording, self.levels)
        report = partial(self.record_event, "control-server")
        serving = ServeOptions(*job.serving) if job.serving is not None else None
        try:
            self.control = CaptureControl(targets, report, is_served=job.control, serving=serving)
            self._breaks = RunBreakpoints(
                job, self.control, lambda text: send(protocol.STOPPED, text=text)
            )
            if job.interactive:
                self.control.barrier.pause(messages.INTERACTIVE)
        except FlexInspectError:
            self.writer.close("failed")
            self.writer.discard()
            raise
        last_kernel_call.start_recording_calls(self.writer.recording_path)
        send(protocol.TRACE, path=path, recording=recording, note=self.writer.note)

    def attach_recorder(self, recorder: Recorder) -> None:
        """Connect the recorder with control, debugger and breakpoints."""
        self.control.barrier.stop_debugger = self._debugging.stop_between_steps
        self.control.attach_recorder(recorder)
        recorder.writer.evaluator = self._evaluator = self._breaks.begin(recorder)
        if self._max_size is not None:
            from flexinspect_hooks.step_writer.size_limit import SizeLimit

            levels = self.levels
            recorder.writer.size_limit = self._size_limit = SizeLimit(
                self.writer.recording_path, self._max_size, lambda: levels.level, levels.set_level
            )

    def attach_session(self, session: CaptureSession) -> None:
        """Let commands and breakpoints act on a session whose recorder is attached."""
        session.barrier = self.control.barrier
        session.use_levels(self.levels)
        session.break_on(self._evaluator)

    def record_event(self, kind: str, text: str, /, **data: Any) -> None:
        """Record an event outside of a step."""
        event = EventRecord(kind, text, time.time(), data=data)
        self._write_safely(lambda: self.writer.write_event(event))
        if kind == "error":
            self._report_failure(event)

    def _report_failure(self, event: EventRecord) -> None:
        """Record the finding of an exception."""
        # Imported here because it loads numpy, which the user's program may want to load first.
        from flexinspect.rules.run_failures import failure_finding

        finding = failure_finding(event, self.generation)
        if finding is not None:
            self._write_safely(lambda: self.writer.write_findings([finding]))

    def record_error(self, error: BaseException) -> None:
        """Record an exception of the program with its traceback."""
        import traceback  # not before the program, which may have a file of this name

        text = "".join(traceback.format_exception(error))
        facts = failure_facts(error)
        self.record_event("error", f"{type(error).__name__}: {error}", **facts, traceback=text)

    def end_observation(self) -> None:
        """End the notes of kernel calls and the debugger, before the trace is closed."""
        last_kernel_call.stop_recording_calls()
        self._debugging.end()

    def report_missing_steps(self) -> None:
        """Record how many steps `--max-size` kept out of the trace, after the last one."""
        event = self._size_limit.final_event() if self._size_limit is not None else None
        if event is not None:
            self._write_safely(lambda: self.writer.write_event(event))

    def update_manifest(self, **facts: Any) -> None:
        """Set facts of the manifest."""
        self._write_safely(lambda: self.writer.update_run(**facts))

    def _write_safely(self, write: Callable[[], object]) -> None:
        """Write to the trace; a full disk does not end the run."""
        with suppress(TraceWriteError):
            write()


def send_error(send: SendMessage, error: FlexInspectError) -> int:
    """Send an error to the process that started this one, and return its exit code."""
    send(protocol.ERROR, message=error.message, hint=error.hint, exit_code=error.exit_code)
    return error.exit_code
