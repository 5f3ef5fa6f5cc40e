"""Run a job without the full-screen interface: print its progress, then the result."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexinspect.cli.output import print_json, stderr_console
from flexinspect.cli.run_progress import RunProgress, print_summary, summarize_run
from flexinspect.core import signals
from flexinspect.core.errors import TraceError
from flexinspect.core.text import escape_unprintable
from flexinspect.launch import child_process
from flexinspect.launch.child_process import Capture
from flexinspect.launch.crash import finish_trace
from flexinspect.records.job import Job
from flexinspect.trace.file.side_files import DebuggerStop, read_stop
from flexinspect.trace.follower import TraceFollower


def show_run(run: Job | Capture, *, as_json: bool, verbose: bool) -> int:
    """Start a generation, or follow a program that was started, and print the result at its end.

    The result of a generation goes to stdout, everything else to stderr; so does the summary of a
    program, except with `as_json`. Returns the exit code: that of the process, or 1 when a signal
    killed our own generation.
    """
    console = stderr_console()
    if isinstance(run, Job):
        live = console.is_terminal and not as_json
        progress = RunProgress(console, verbose=verbose, quiet=as_json, live=live)
        _handle_end_signals()
        live_run = LiveRun(child_process.start_capture(run), progress)
    else:
        progress = RunProgress(console, verbose=verbose, quiet=not verbose)
        live_run = LiveRun(run, progress)
    with progress:
        code = live_run.watch()
    return live_run.conclude(code, as_json=as_json)


def conclude_run(process: Capture, code: int, *, stopping: bool) -> int:
    """Wait for a run whose interface was closed, and print its result as `show_run` does.

    With `stopping`, the run was asked to end before, so that the first Ctrl-C kills it.
    """
    progress = RunProgress(stderr_console(), quiet=True)
    if process.poll() is None:
        progress.console.print("finishing the trace (Ctrl-C ends it at once) …")
    _handle_end_signals()
    process.state.pauses.clear()  # already shown by the interface
    run = LiveRun(process, progress, stops=int(stopping))
    run_code = run.conclude(run.watch(), as_json=False)
    return code or run_code


def _handle_end_signals() -> None:
    """Make `kill`, `timeout` and a closed terminal end a run as Ctrl-C does, with a valid trace."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            signals.raise_on_signals(name)


MAX_NOTES = 8
MAX_ANSWERS = 10


class LiveRun:
    """Follows a capture process: shows its progress and prints its result.

    A program of the user keeps its own signals, stdout and exit code. Signals are passed on to it
    each time, because it decides what they mean.
    """

    def __init__(self, process: Capture, progress: RunProgress, *, stops: int = 0) -> None:
        self._process, self._state, self._progress = process, process.state, progress
        self._is_program = process.has_own_streams
        self._follower: TraceFollower | None = None
        self._stops = stops
        self._end_signal = int(signal.SIGINT)
        self._debugger_stop: DebuggerStop | None = None

    def watch(self) -> int:
        """Follow the trace until the process ends, and return its exit code.

        The first Ctrl-C asks the process to end its generation and trace; the second kills it.
        """
        while True:
            try:
                code = self._process.poll()
                while self._state.pauses:
                    # Even in quiet mode, where the run would seem to hang.
                    self._print_notice(self._state.pauses.popleft())
                self._poll()
                if self._state.wants_terminal and code is None:
                    with self._progress.suspended():
                        child_process.hand_over_terminal(self._process)
                if code is not None:
                    self._close()
                    return code
                time.sleep(child_process.POLL_INTERVAL_S)
            except KeyboardInterrupt as error:
                self._stop(signals.interrupt_signal(error))

    def _print(self, text: str) -> None:
        self._progress.console.print(escape_unprintable(text), soft_wrap=True)

    def _print_notice(self, text: str) -> None:
        self._print(f"flexinspect: {text}")

    def _stop(self, number: int) -> None:
        self._stops += 1
        if self._stops >= (child_process.KILL_AFTER_INTERRUPTS if self._is_program else 2):
            self._process.kill()
            return
        self._end_signal = number
        self._progress.print_line("stopping after this step (Ctrl-C again ends it at once)")
        self._process.signal(number)

    def _poll(self) -> None:
        state = self._state
        if self._is_program:
            while state.debugger_messages:  # such as where to attach
                self._print_notice(state.debugger_messages.popleft())
        while state.prints:
            self._progress.print_line(state.prints.popleft())
        if self._follower is None and (state.recording is None or state.is_over):
            return
        if state.recording is not None:
            self._report_debugger_stop(state.recording)
        # The trace of a program is read in verbose mode only: the program may need every core.
        if self._is_program and not self._progress.verbose:
            return
        try:
            if self._follower is None and state.recording is not None:
                self._follower = TraceFollower(state.recording)
            if self._follower is not None:
                self._progress.show(self._follower.poll(), self._follower.reader)
        except TraceError:
            if state.recording is not None and state.recording.exists():
                raise
            # The process removed its trace or moved it to its final place; its end shows which.
            self._close()

    def _report_debugger_stop(self, recording: Path) -> None:
        """Print once where a debugger has stopped the run: no step comes until it continues."""
        stop = read_stop(recording)
        if stop is not None and stop.debugger != "pdb" and stop != self._debugger_stop:
            # The progress of a program is quiet.
            show = self._print_notice if self._is_program else self._progress.print_line
            show(stop.sentence())
        self._debugger_stop = stop

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def conclude(self, code: int, *, as_json: bool) -> int:
        """Print the result and, if the run failed, the reason. Return the exit code."""
        state, process = self._state, self._process
        path = finish_trace(process, code)
        summary = summarize_run(path) if path is not None else None
        if as_json:
            facts = summary or {"trace": None, "generations": []}
            if summary is not None:
                facts["findings"] = [asdict(finding) for finding in summary["findings"]]
            error = state.error or (None if code == 0 else process.describe_exit(code))
            facts |= {"exit_code": self._exit_code(code), "error": error, "hint": state.hint}
            print_json(facts)
        elif summary is not None and not self._is_program:
            print_summary(summary)
        elif summary is not None:
            self._print_program_summary(summary)
        lines = [f"flexinspect: {state.note}"] if state.note else []
        if state.error:
            lines += [f"flexinspect: {state.error}", state.hint or ""]
        else:
            lines += self._end_lines(code, has_trace=path is not None)
        for line in filter(None, lines):
            self._print(line)
        return self._exit_code(code)

    def _print_program_summary(self, summary: dict[str, Any]) -> None:
        print_summary(summary, self._progress.console, limit=MAX_ANSWERS)
        notes = list(dict.fromkeys(summary["notes"]))
        for note in notes[:MAX_NOTES]:
            self._print(f"note  {note}")
        if len(notes) > MAX_NOTES:
            self._print(f"note  and {len(notes) - MAX_NOTES} more events in the trace")

    def _exit_code(self, code: int) -> int:
        """Return our exit code; that of a program is the one that a shell reports."""
        if self._is_program:
            return code if code >= 0 else 128 - code
        if self._stops and code != 0:
            return 128 + self._end_signal
        return code if code >= 0 else 1

    def _end_lines(self, code: int, *, has_trace: bool) -> list[str]:
        """Return how a run ended that reported no error, and the last lines of its stderr."""
        ending = f"flexinspect: {self._process.describe_exit(code)}"
        if self._is_program:  # it has printed its own messages
            return [ending] if code < 0 else []
        lines = []
        if code not in (0, signals.INTERRUPTED) and not self._stops:
            lines.append(ending)
        elif not has_trace:
            lines.append("flexinspect: The run was stopped before anything ran; there is no trace.")
        if not signals.is_signal_exit_code(code) and (has_trace or not self._stops):
            # Warnings of a successful run, or the last output of one that died without a message.
            # A run that was stopped while loading prints only Python's own traceback.
            lines += self._process.last_stderr_lines()
        return lines
