"""Run a job without the full-screen interface: print its progress, then the result."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.cli.output import print_json, stderr_console
from flexinspect.cli.run_progress import RunProgress, RunSummary, print_summary, summarize_run
from flexinspect.core.errors import TraceError
from flexinspect.core.signals import (
    INTERRUPTED,
    interrupt_signal,
    is_signal_exit_code,
    raise_on_signals,
)
from flexinspect.core.text import escape_unprintable
from flexinspect.launch.child_process import (
    KILL_AFTER_INTERRUPTS,
    POLL_INTERVAL_S,
    Capture,
    hand_over_terminal,
    start_capture,
)
from flexinspect.launch.crash import finish_trace
from flexinspect.records.job import Job
from flexinspect.trace.file.side_files import DebuggerStop, read_stop
from flexinspect.trace.follower import NewGeneration, NewStep, TraceFollower, TraceUpdates
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    pass


def show_run(job: Job, *, as_json: bool, verbose: bool) -> int:
    """Start the capture process, show its progress, and print the result.

    The result goes to stdout, everything else to stderr. Returns the exit code: that of the
    capture process, or 1 when a signal killed it.
    """
    console = stderr_console()
    live = console.is_terminal and not as_json
    progress = RunProgress(console, verbose=verbose, quiet=as_json, live=live)
    _handle_end_signals()
    run = LiveRun(start_capture(job), progress)
    with progress:
        code = run.watch()
    return run.conclude(code, as_json=as_json)


def show_script(process: Capture, *, as_json: bool, verbose: bool) -> int:
    """Follow a user's program to its end, and print a summary of its trace on stderr.

    With `as_json` the summary goes to stdout. Returns the program's exit code.
    """
    progress = RunProgress(stderr_console(), verbose=verbose, quiet=not verbose)
    run = LiveScriptRun(process, progress)
    return run.conclude(run.watch(), as_json=as_json)


def conclude_run(process: Capture, code: int, *, stopping: bool) -> int:
    """Wait for a run whose interface was closed, and print its result as `show_run` does.

    With `stopping`, the run was asked to end before, so that the first Ctrl-C kills it.
    """
    progress = RunProgress(stderr_console(), quiet=True)
    if process.poll() is None:
        progress.console.print("finishing the trace (Ctrl-C ends it at once) …")
    _handle_end_signals()
    process.state.pauses.clear()  # already shown by the interface
    kind = LiveScriptRun if process.has_own_streams else LiveRun
    run = kind(process, progress, stops=int(stopping))
    run_code = run.conclude(run.watch(), as_json=False)
    return code or run_code


def _handle_end_signals() -> None:
    """Make `kill`, `timeout` and a closed terminal end a run as Ctrl-C does, with a valid trace."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            raise_on_signals(name)


class LiveRun:
    """Follows a capture process: shows its progress and prints its result."""

    kill_after_interrupts = 2

    def __init__(self, process: Capture, progress: RunProgress, *, stops: int = 0) -> None:
        self._process = process
        self._progress = progress
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
                while self._process.state.pauses:
                    # Even in quiet mode, where the run would seem to hang.
                    self._print_notice(self._process.state.pauses.popleft())
                self._poll()
                if self._process.state.wants_terminal and code is None:
                    with self._progress.suspended():
                        hand_over_terminal(self._process)
                if code is not None:
                    self._close()
                    return code
                time.sleep(POLL_INTERVAL_S)
            except KeyboardInterrupt as error:
                self._stop(interrupt_signal(error))

    def _print(self, text: str) -> None:
        self._progress.console.print(escape_unprintable(text), soft_wrap=True)

    def _print_notice(self, text: str) -> None:
        self._print(f"flexinspect: {text}")

    def _stop(self, number: int) -> None:
        self._stops += 1
        if self._stops >= self.kill_after_interrupts:
            self._process.kill()
            return
        self._end_signal = number
        self._progress.print_line("stopping after this step (Ctrl-C again ends it at once)")
        self._process.signal(number)

    def _poll(self) -> None:
        state = self._process.state
        while state.prints:
            self._progress.print_line(state.prints.popleft())
        if self._follower is None and (state.recording is None or state.is_over):
            return
        if state.recording is not None:
            self._report_debugger_stop(state.recording)
        try:
            if self._follower is None and state.recording is not None:
                self._follower = TraceFollower(state.recording)
            if self._follower is not None:
                self._show(self._follower.poll(), self._follower.reader)
        except TraceError:
            if state.recording is not None and state.recording.exists():
                raise
            # The process removed its trace or moved it to its final place; its end shows which.
            self._close()

    def _report_debugger_stop(self, recording: Path) -> None:
        """Print once where a debugger has stopped the run: no step comes until it continues."""
        stop = read_stop(recording)
        if stop is not None and stop.debugger != "pdb" and stop != self._debugger_stop:
            self._report(stop.sentence())
        self._debugger_stop = stop

    def _report(self, text: str) -> None:
        self._progress.print_line(text)

    def _show(self, updates: TraceUpdates, reader: TraceReader) -> None:
        for row in updates.events:
            self._progress.on_event(row.event)
        for change in updates.changes:
            if isinstance(change, NewGeneration):
                self._progress.on_generation_start(change.generation, reader)
            elif isinstance(change, NewStep):
                self._progress.on_step(change.step, change.tokens, reader)
            else:
                self._progress.on_generation_end()

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def conclude(self, code: int, *, as_json: bool) -> int:
        """Print the result and, if the run failed, the reason. Return the exit code."""
        state, process = self._process.state, self._process
        path = finish_trace(process, code)
        summary = summarize_run(path) if path is not None else None
        if as_json:
            facts = asdict(summary) if summary else {"trace": None, "generations": []}
            error = state.error or (None if code == 0 else process.describe_exit(code))
            facts |= {"exit_code": self._exit_code(code), "error": error, "hint": state.hint}
            print_json(facts)
        elif summary is not None:
            self._print_result(summary)
        lines = [f"flexinspect: {state.note}"] if state.note else []
        if state.error:
            lines += [f"flexinspect: {state.error}", state.hint or ""]
        else:
            lines += self._end_lines(code, has_trace=path is not None)
        for line in filter(None, lines):
            self._print(line)
        return self._exit_code(code)

    def _print_result(self, summary: RunSummary) -> None:
        print_summary(summary)

    def _exit_code(self, code: int) -> int:
        if self._stops and code != 0:
            return 128 + self._end_signal
        return code if code >= 0 else 1

    def _end_lines(self, code: int, *, has_trace: bool) -> list[str]:
        """Return how a run ended that reported no error, and the last lines of its stderr."""
        lines = []
        if code not in (0, INTERRUPTED) and not self._stops:
            lines.append(f"flexinspect: {self._process.describe_exit(code)}")
        elif not has_trace:
            lines.append("flexinspect: The run was stopped before anything ran; there is no trace.")
        if not is_signal_exit_code(code) and (has_trace or not self._stops):
            # Warnings of a successful run, or the last output of one that died without a message.
            # A run that was stopped while loading prints only Python's own traceback.
            lines += self._process.last_stderr_lines()
        return lines


MAX_NOTES = 8
MAX_ANSWERS = 10


class LiveScriptRun(LiveRun):
    """Follows a program of the user, which keeps its own signals, stdout and exit code.

    Signals are passed on each time, because the program decides what they mean.
    """

    kill_after_interrupts = KILL_AFTER_INTERRUPTS

    def _poll(self) -> None:
        """Read the trace only in verbose mode: the program may need every core."""
        state = self._process.state
        while state.debugger_messages:  # such as where to attach
            self._print_notice(state.debugger_messages.popleft())
        if self._progress.verbose:
            super()._poll()
        elif state.recording is not None:
            self._report_debugger_stop(state.recording)

    def _report(self, text: str) -> None:
        """Print a message even though the run of a program is quiet otherwise."""
        self._print_notice(text)

    def _exit_code(self, code: int) -> int:
        """Return the exit code of the program as a shell reports it."""
        return code if code >= 0 else 128 - code

    def _print_result(self, summary: RunSummary) -> None:
        print_summary(summary, self._progress.console, limit=MAX_ANSWERS)
        notes = list(dict.fromkeys(summary.notes))
        for note in notes[:MAX_NOTES]:
            self._print(f"note  {note}")
        if len(notes) > MAX_NOTES:
            self._print(f"note  and {len(notes) - MAX_NOTES} more events in the trace")

    def _end_lines(self, code: int, *, has_trace: bool) -> list[str]:
        """Return only our own message: the program has printed its own."""
        return [f"flexinspect: {self._process.describe_exit(code)}"] if code < 0 else []
