"""`flexinspect open`: the interface on a trace, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.errors import UsageError
from flexinspect.text import escape_unprintable

if TYPE_CHECKING:
    from flexinspect.app import InspectorApp
    from flexinspect.job import Job, ScriptJob
    from flexinspect.panels.base import TracePlace

EXAMPLES = """\
examples:
  flexinspect open run.flextrace
  flexinspect open run.flextrace --step 12 --layer 3
  flexinspect open run.flextrace --web
"""


def add_parser(subparsers: Any) -> None:
    """Register the subcommand with what `ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "open",
        help="step through a trace in the terminal",
        description="Open a trace, finished or still being recorded, and step through its tokens. "
        "'?' shows the keys.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace file")
    parser.add_argument(
        "--generation", metavar="N", type=non_negative_int, help="begin in this generation"
    )
    parser.add_argument("--step", metavar="N", type=non_negative_int, help="begin at this step")
    parser.add_argument("--layer", metavar="N", type=non_negative_int, default=0)
    parser.add_argument("--head", metavar="N", type=non_negative_int, default=0)
    parser.add_argument(
        "--web", action="store_true", help="serve the interface to a browser on this machine"
    )
    parser.add_argument(
        "--port", type=non_negative_int, default=8422, help="of --web (default: 8422)"
    )
    parser.set_defaults(run=run)


def non_negative_int(text: str) -> int:
    """Read a whole number from 0 on from a flag."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Open what the flags name."""
    if args.web:
        from flexinspect.commands.web import serve

        return serve(args.trace, args.port, _place_flags(args))
    return open_trace_file(args.trace, _start_place(args))


def open_trace_file(trace: Path, place: TracePlace | None = None) -> int:
    """Open the interface on a trace, finished or growing."""
    _require_terminal(trace)
    from flexinspect.app import InspectorApp

    return _run_app(InspectorApp(trace, place=place, keymap=_keymap()))


def _place_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of a place as they were given, for the interface in a browser."""
    given = {name: getattr(args, name) for name in ("generation", "step", "layer", "head")}
    return [word for name, n in given.items() if n for word in (f"--{name}", str(n))]


def _start_place(args: argparse.Namespace) -> Any:
    from flexinspect.panels.base import TracePlace

    if args.generation is None and args.step is None and not (args.layer or args.head):
        return None
    return TracePlace(args.generation or 0, 0, args.step or 0, args.layer, args.head)


def open_start_screen() -> int:
    """Show the start screen."""
    from flexinspect.app import InspectorApp
    from flexinspect.commands.run import job_from_argv

    return _run_app_and_job(InspectorApp(keymap=_keymap(), make_job=job_from_argv))


def inspect_run(job: Job | ScriptJob) -> int:
    """Run a job under the interface, then print its result.

    Our own generation keeps its model until the interface closes, for restores and forks.
    """
    from flexinspect.app import InspectorApp
    from flexinspect.job import Job

    held = replace(job, hold=True) if isinstance(job, Job) else job
    return _run_app_and_job(InspectorApp(job=held, keymap=_keymap()))


def _keymap() -> dict[str, str]:
    from flexinspect.config import load_config

    return dict(load_config().keys)


def _require_terminal(trace: Path) -> None:
    served = "TEXTUAL_DRIVER" in os.environ  # in a browser, see web.py
    if not served and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "The interface needs a terminal, and there is none here.",
            hint=f"Without one: flexinspect show {trace}, or flexinspect dump {trace}.",
        )


def _run_app(app: InspectorApp) -> int:
    """Run the interface; a trace that could not be read makes it end with that error."""
    app.run()
    if app.trace_error is not None:
        raise app.trace_error
    return app.return_code or 0


def _run_app_and_job(app: InspectorApp) -> int:
    """Run the interface; if it began a run, let that end and print its result."""
    try:
        code = _run_app(app)
    finally:
        feed = app.session
        process = feed.process if feed is not None else None
        if feed is not None and feed.exit_code is None and not (feed.is_detached or feed.is_ending):
            feed.interrupt()
    if process is None:
        return code
    if feed is not None and feed.is_detached:
        print(f"The run goes on; see it again with: flexinspect attach {process.pid}")
        return 0
    for text in app.session.prints if app.session is not None else ():
        print(
            escape_unprintable(text), file=sys.stderr
        )  # what the user's own code printed meanwhile
    process.show_output()
    from flexinspect.commands.live import conclude_run

    return conclude_run(process, code, stopping=app.session is not None and app.session.is_stopping)
