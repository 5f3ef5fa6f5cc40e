"""A run without the full-screen interface: its progress on stderr, and its result."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flexinspect.cli.output import print_json, stderr_console
from flexinspect.cli.run_log import RunLog
from flexinspect.cli.run_summary import MAX_QUESTION_CHARS, NO_NOTES, print_summary, summarize_run
from flexinspect.cli.step_lines import mask_lines, plan_line, step_lines
from flexinspect.core import signals
from flexinspect.core.errors import TraceError
from flexinspect.core.text import escape_unprintable, truncate
from flexinspect.launch import child_process
from flexinspect.launch.child_process import Capture
from flexinspect.launch.crash import finish_trace
from flexinspect.records.job import Job
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.side_files import DebuggerStop, read_stop
from flexinspect.trace.queries import question_text
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.cli.step_prompt import StepPrompt

MAX_NOTES, MAX_ANSWERS = 8, 10  # in the summary of a program
MAX_PICTURES = 5
"""Masks that are drawn in verbose mode: those of the first generations, of perhaps thousands."""


class ExperimentProgress:
    """Progress on stderr of an experiment on a model: of its loading, and of its own steps."""

    def __init__(self, *, quiet: bool) -> None:
        console = stderr_console()
        self._is_terminal = console.is_terminal and not quiet
        self.shown = RunProgress(console, quiet=quiet, live=self._is_terminal)

    def show_phase(self, phase: str, data: Mapping[str, Any]) -> None:
        """Show a phase of loading a model."""
        self.shown.on_event(EventRecord("phase", phase, time.time(), data=data))

    def report(self, phase: str, fraction: float | None) -> None:
        """Show a step of the experiment; a log file need not have these many small steps."""
        if self._is_terminal:
            self.show_phase(phase, {} if fraction is None else {"fraction": fraction})


class RunProgress:
    """Prints the progress of a run: its phases, questions and messages; nothing when `quiet`.

    With `live`, for a terminal, the current phase and the newest tokens are a few lines at the
    bottom, redrawn only when something has changed. A prompt, if there is one, reports pauses.
    """

    def __init__(
        self,
        console: Console,
        *,
        verbose: bool = False,
        quiet: bool = False,
        live: bool = False,
        has_prompt: bool = False,
    ) -> None:
        self.console, self.verbose, self._quiet = console, verbose, quiet
        pauses = ("paused", "resumed") if has_prompt else ()
        self._skipped_events = {*NO_NOTES, "breakpoint", *pauses}
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._phase = ""
        self._fraction: float | None = None
        self.reader: TraceReader | None = None
        self._last_event = self._generation = self._next_step = 0
        self._n_pictures = 0
        self._is_announced = False
        self._lines: list[str] = []
        """What was read and is not yet printed: Ctrl-C may come between the two."""
        self._begin_generation()

    def _begin_generation(self) -> None:
        self._text, self._n_tokens, self._wall_ms, self._capture_ms = "", 0, 0.0, 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Draw nothing while the body runs and another program uses the terminal."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def print_line(self, text: str) -> None:
        """Print a line unless quiet."""
        if not self._quiet:
            self.console.print(escape_unprintable(text), soft_wrap=self._live is None)

    def on_event(self, event: EventRecord) -> None:
        """Handle an event: a phase moves the bar, anything else is printed."""
        if event.kind == "phase":
            self._on_phase(event)
        elif event.kind == "breakpoint" and not event.text.startswith("paused"):
            self.print_line(event.text)
        elif event.kind not in self._skipped_events:
            self.print_line(f"{event.kind}: {event.text}")
        self._draw()

    def _on_phase(self, event: EventRecord) -> None:
        fraction = event.data.get("fraction")
        self._fraction = float(fraction) if isinstance(fraction, (int, float)) else None
        if event.text == "plan":
            self.print_line(plan_line(event.data))
        elif event.text == "note":
            self.print_line(str(event.data.get("text", "")))
        elif event.text != self._phase:
            self._phase = event.text
            if self._live is None:
                self.print_line(f"{event.text} …")

    def follow(self, recording: Path) -> None:
        """Show what is new in a trace that is being recorded; cheap when nothing is."""
        if self.reader is None:
            self.reader = TraceReader(recording)
        elif not self.reader.changed() and not self._lines:
            return
        with self.reader.snapshot():  # printed after it: a terminal that blocks would hold it open
            events = list(self.reader.events(self._last_event))
            while self._read_generation(self.reader):
                pass
        for row in events:
            self._last_event = row.id
            self.on_event(row.event)
        self._print_lines()
        self._draw()

    def _print_lines(self) -> None:
        while self._lines:
            self.print_line(self._lines.pop(0))

    def stop_following(self) -> None:
        """Close the trace; the next one is shown from its beginning."""
        if self.reader is not None:
            self.reader.close()
        self._print_lines()
        self.reader, self._last_event = None, 0
        self._generation, self._next_step, self._is_announced = 0, 0, False

    def _read_generation(self, reader: TraceReader) -> bool:
        """Add the new lines of the current generation; True when it ended and a next may follow."""
        rows = reader.generations()
        if len(rows) <= self._generation:
            return False
        row = rows[self._generation]
        if not self._is_announced:
            self._begin_generation()
            question = truncate(question_text(reader, row.generation), MAX_QUESTION_CHARS)
            self._lines.append(f"generation {row.generation}: {question}")
            self._is_announced = True
        for step in reader.steps(self._generation, start=self._next_step):
            self._next_step = step.step + 1
            tokens = reader.step_tokens(self._generation, step.step)
            self._n_tokens += len(tokens)
            self._text += "".join(token.text for token in tokens if not token.special)
            self._capture_ms += step.capture_ms
            self._wall_ms += step.wall_ms if step.step else 0.0
            if self.verbose:
                self._lines += step_lines(step, reader)
                if step.step == 0 and self._n_pictures < MAX_PICTURES:
                    self._n_pictures += 1
                    self._lines += mask_lines(step, reader, min(self.console.width, 160))
        if row.state == "recording":
            return False
        self._generation, self._next_step, self._is_announced = self._generation + 1, 0, False
        return True

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        row: list[RenderableType] = [Text(self._phase, style="bold")]
        if self._fraction is not None:
            row.append(ProgressBar(total=1.0, completed=self._fraction, width=30))
        bar.add_row(*row)
        if not self._n_tokens:
            return bar
        # Only the end: text taller than the window cannot be redrawn in place.
        newest = escape_unprintable(self._text)[-2 * self.console.width :]
        count = f"  token {self._n_tokens}  "
        if self._n_tokens >= 2 and self._wall_ms:
            count += f"{(self._n_tokens - 1) / (self._wall_ms / 1e3):.1f} tokens/s, "
            count += f"capture {self._capture_ms / self._n_tokens:.2f} ms/step"
        text = Text("  " + newest, style="green", overflow="fold")
        return Group(bar, text, Text(count, style="dim"))


class ShowOptions(Struct, frozen=True):
    """How a run without the interface is shown.

    `interactive` reads commands where the model pauses, `waits` leaves it paused at their end.
    `log_file` gets the run as lines of Python's logging.
    """

    as_json: bool = False
    verbose: bool = False
    interactive: bool = False
    waits: bool = False
    log_file: str | None = None


Judge: TypeAlias = Callable[[int], int]
"""Judges a trace that is complete, and returns the exit code: that of the run, or its own."""


def show_run(run: Job | Capture, options: ShowOptions, judge: Judge = lambda code: code) -> int:
    """Start a generation, or follow a program that was started, and print the result at its end.

    The result of a generation goes to stdout. Everything else goes to stderr, also the summary of
    a program, unless it is JSON: then it is a JSON object on stdout. Returns the exit code: that of
    the process, or 1 when a signal killed our own generation.
    """
    console, is_own = stderr_console(), isinstance(run, Job)
    # Who steps through a run sees each step.
    verbose = options.verbose or options.interactive
    quiet = (options.as_json if is_own else not verbose) and not options.interactive
    live = is_own and console.is_terminal and not options.as_json
    progress = RunProgress(
        console, verbose=verbose, quiet=quiet, live=live, has_prompt=options.interactive
    )
    if isinstance(run, Job):
        signals.raise_on_end_signals()
        run = child_process.start_capture(run)
    prompt = None
    if options.interactive:
        from flexinspect.cli.step_prompt import StepPrompt

        prompt = StepPrompt(run.pid, console, waits=options.waits)
    log = None if options.log_file is None else RunLog(options.log_file)
    live_run = LiveRun(run, progress, prompt=prompt, log=log)
    with progress:
        code = live_run.watch()
    return live_run.conclude(code, as_json=options.as_json, judge=judge)


def conclude_run(
    process: Capture, code: int, *, stopping: bool, log_file: str | None = None
) -> int:
    """Wait for a run whose interface was closed, and print its result as `show_run` does.

    If it is `stopping`, the first Ctrl-C kills it.
    """
    progress = RunProgress(stderr_console(), quiet=True)
    if process.poll() is None:
        progress.console.print("finishing the trace (Ctrl-C ends it at once) …")
    signals.raise_on_end_signals()
    process.state.pauses.clear()  # already shown by the interface
    log = None if log_file is None else RunLog(log_file)
    run = LiveRun(process, progress, stops=int(stopping), log=log)
    run_code = run.conclude(run.watch(), as_json=False)
    return code or run_code


END_WITHIN_S = 10.0
"""Seconds that a run has to end after Ctrl-C, before it is killed."""


class LiveRun:
    """Follows a capture process: shows its progress and prints its result.

    A program of the user keeps its own signals, stdout and exit code. Signals are passed on to it
    each time, because it decides what they mean. A `prompt` reads commands where it pauses.
    """

    def __init__(
        self,
        process: Capture,
        progress: RunProgress,
        *,
        stops: int = 0,
        prompt: StepPrompt | None = None,
        log: RunLog | None = None,
    ) -> None:
        self._process, self._state, self._progress = process, process.state, progress
        self._is_program = process.has_own_streams
        self._stops, self._prompt, self._log = stops, prompt, log
        self._end_signal = int(signal.SIGINT)
        self._stopped_at = time.monotonic()
        self._debugger_stop: DebuggerStop | None = None

    def watch(self) -> int:
        """Follow the run until its end; one Ctrl-C stops it after a step, a second one kills it.

        It is also killed if it does not end within `END_WITHIN_S` of the first one.
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
                    self._progress.stop_following()
                    return code
                self._read_commands()
                self._kill_if_it_hangs()
                time.sleep(child_process.POLL_INTERVAL_S)
            except KeyboardInterrupt as error:
                self._stop(signals.interrupt_signal(error))

    def _read_commands(self) -> None:
        """Read commands if the model is paused; its last step is printed first."""
        if self._prompt is None or (status := self._prompt.paused_status()) is None:
            return
        self._poll()
        with self._progress.suspended():
            self._prompt.read_commands(status)

    def _print(self, text: str) -> None:
        self._progress.console.print(escape_unprintable(text), soft_wrap=True)

    def _print_notice(self, text: str) -> None:
        self._print(f"flexinspect: {text}")

    def _stop(self, number: int) -> None:
        self._stops += 1
        if self._stops >= (child_process.KILL_AFTER_INTERRUPTS if self._is_program else 2):
            self._process.kill()
            return
        self._end_signal, self._stopped_at = number, time.monotonic()
        self._progress.print_line("stopping after this step (Ctrl-C again ends it at once)")
        self._process.signal(number)

    def _kill_if_it_hangs(self) -> None:
        """Kill a run that was stopped and does not end, because of a plug-in or a call in C.

        A program decides itself, a debugger waits for its user, and a trace for another file system
        is being moved there.
        """
        state = self._state
        is_moved = state.recording is not None and state.recording != state.path
        if not self._stops or self._is_program or state.wants_terminal or is_moved:
            return
        if time.monotonic() - self._stopped_at > END_WITHIN_S and not self._process.was_killed:
            late = f"the run did not end within {END_WITHIN_S:.0f} s of the signal, and was killed"
            self._progress.print_line(f"{late}; the trace has every step that was written")
            self._process.kill()

    def _poll(self) -> None:
        state = self._state
        if self._is_program:
            while state.debugger_messages:  # such as where to attach
                self._print_notice(state.debugger_messages.popleft())
        while state.prints:
            self._progress.print_line(state.prints.popleft())
        if state.recording is None or (state.is_over and self._progress.reader is None):
            return
        self._report_debugger_stop(state.recording)
        if self._log is not None:
            with suppress(TraceError):  # the end of the run shows why
                self._log.follow(state.recording)
        # The trace of a program is read in verbose mode only: the program may need every core.
        if self._is_program and not self._progress.verbose:
            return
        try:
            self._progress.follow(state.recording)
        except TraceError:
            if state.recording.exists():
                raise
            # The process removed its trace or moved it to its final place; its end shows which.
            self._progress.stop_following()

    def _report_debugger_stop(self, recording: Path) -> None:
        """Print once where a debugger has stopped the run: no step comes until it continues."""
        stop = read_stop(recording)
        if stop is not None and stop.debugger != "pdb" and stop != self._debugger_stop:
            # The progress of a program is quiet.
            show = self._print_notice if self._is_program else self._progress.print_line
            show(stop.sentence())
        self._debugger_stop = stop

    def conclude(self, code: int, *, as_json: bool, judge: Judge = lambda code: code) -> int:
        """Print the result and, if the run failed, the reason. Return the exit code.

        `judge` comes after the summary, but before JSON, which has its findings and its exit code.
        """
        state, process = self._state, self._process
        path = finish_trace(process, code)
        if self._log is not None:
            self._log.close(path)
        exit_code = self._exit_code(code)
        if as_json:
            exit_code = judge(exit_code)
        summary = summarize_run(path) if path is not None else None
        if as_json:
            facts = summary or {"trace": None, "generations": []}
            error = state.error or (None if code == 0 else process.describe_exit(code))
            facts.pop("is_own", None)  # only for the commands that are printed
            facts |= {"exit_code": exit_code, "error": error, "hint": state.hint}
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
        return exit_code if as_json else judge(exit_code)

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
