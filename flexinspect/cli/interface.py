"""Running the full-screen interface for a command: on a trace, on a job, or on the start screen."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.core.low_bandwidth import choose_bandwidth
from flexinspect.core.text import escape_unprintable, print_message

if TYPE_CHECKING:
    from pathlib import Path

    from flexinspect.records.job import Job, ScriptJob
    from flexinspect.tui.app import InspectorApp
    from flexinspect.tui.screens.start_screen import JobFactory


def open_trace_file(
    trace: Path, place: Mapping[str, int] | None = None, *, has_tour: bool = False
) -> int:
    """Open the interface on a trace, finished or being recorded, and return the exit code.

    `place` are the fields of the first `TracePlace`. With `has_tour` a tour leads through it.

    Raises `UsageError` without a terminal, and `TraceError` for a trace that could not be read.
    """
    if not _has_terminal():
        from flexinspect.trace.file.connections import check_header

        check_header(trace)  # for a missing file or another one, no command is the remedy
        check_terminal(f"Without one: flexinspect show {trace}, or flexinspect dump {trace}.")
    return _run_app(_make_app(trace, place, has_tour=has_tour))


def open_comparison(one: Path, other: Path, generation: int) -> int:
    """Show a generation of two traces side by side, and return the exit code.

    Raises `UsageError` without a terminal, and for a training and a generation; `TraceError` for a
    trace that could not be read.
    """
    from flexinspect.analysis.run_diff.traces import check_same_kind, is_training
    from flexinspect.trace.reader import open_trace

    check_terminal("Without one: flexinspect diff prints where two traces differ.")
    with open_trace(one) as a, open_trace(other) as b:
        check_same_kind(a, b)  # an error is printed, not shown by an interface
        if is_training(a):
            raise UsageError(
                "--ui shows generations of tokens side by side, and A and B are trainings.",
                hint="Leave --ui out: their steps are compared as text.",
            )
    return _run_app(_make_app(compare=(one, other, generation)))


def open_ranks_of(folder: Path, name: str | None = None) -> int:
    """Show the ranks of a distributed run side by side, and return the exit code.

    Raises `UsageError` for a folder without traces of ranks and without a terminal, and
    `TraceError`.
    """
    from flexinspect.analysis.ranks.rank_comparison import compare_ranks
    from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
    from flexinspect.cli.progress import progress_bar

    run, notes = find_run(folder, name)
    check_terminal(f"Without one: flexinspect ranks {folder}.")
    with open_ranks(run) as readers, progress_bar("comparing the ranks") as update:
        found = compare_ranks(run, readers, update)
    code = _run_app(_make_app(ranks=found))
    for note in notes:
        print_message(note)
    return code


def check_terminal(hint: str) -> None:
    """Raise `UsageError` with a hint where there is no terminal."""
    if not _has_terminal():
        raise UsageError("The interface needs a terminal, and there is none here.", hint=hint)


def _has_terminal() -> bool:
    is_served = "TEXTUAL_DRIVER" in os.environ  # set by textual-serve: the page is the terminal
    return is_served or (sys.stdin.isatty() and sys.stdout.isatty())


def open_start_screen(make_job: JobFactory) -> int:
    """Show the start screen; `make_job` returns the job of a command line typed there."""
    return _run_app_and_job(_make_app(make_job=make_job))


def inspect_run(job: Job | ScriptJob, log_file: str | None = None) -> int:
    """Run a job under the interface, which keeps our own model for rewinds; print its result.

    The `log_file`, if any, is written at the end.
    """
    from flexinspect.records.job import Job

    app = _make_app(job=replace(job, hold=True) if isinstance(job, Job) else job)
    return _run_app_and_job(app, log_file)


def _make_app(
    trace: Path | None = None, place: Mapping[str, int] | None = None, **options: Any
) -> InspectorApp:
    # The app enables it again after its first frame; until then it costs 90 ms and frees nothing.
    gc.disable()
    choose_bandwidth()
    try:
        from flexinspect.inputs.config import load_config
        from flexinspect.panels.base import TracePlace
        from flexinspect.tui.app import InspectorApp

        first = TracePlace(**place) if place else None
        return InspectorApp(trace, place=first, keymap=dict(load_config().keys), **options)
    except BaseException:
        gc.enable()
        raise


def _run_app(app: InspectorApp) -> int:
    """Run the interface. Raises the `TraceError` of a trace that could not be read."""
    try:
        app.run()
    finally:
        gc.enable()
    if app.trace_error is not None:
        raise app.trace_error
    return app.return_code or 0


def _run_app_and_job(app: InspectorApp, log_file: str | None = None) -> int:
    """Run the interface; if it started a job, wait for its end and print its result."""
    try:
        code = _run_app(app)
    finally:
        session = app.session
        is_left = session is None or session.is_detached or session.is_ending
        if session is not None and session.exit_code is None and not is_left:
            session.interrupt()
    if session is None or session.process is None:
        return code
    if session.is_detached:
        print(f"The run continues; to see it again: flexinspect attach {session.process.pid}")
        return 0
    while prints := session.process.state.prints:  # by the user's own code, under the interface
        print(escape_unprintable(prints.popleft()), file=sys.stderr)
    session.process.show_output()
    from flexinspect.cli.live_run import conclude_run

    return conclude_run(session.process, code, stopping=session.is_stopping, log_file=log_file)
