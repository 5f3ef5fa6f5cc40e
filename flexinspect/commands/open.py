"""`flexinspect open`: the interface on a trace, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.errors import UsageError
from flexinspect.text import visible

if TYPE_CHECKING:
    from flexinspect.app import InspectorApp
    from flexinspect.job import Job, ScriptJob
    from flexinspect.panels.base import Place

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
        "--generation", metavar="N", type=whole_number, help="begin in this generation"
    )
    parser.add_argument("--step", metavar="N", type=whole_number, help="begin at this step")
    parser.add_argument("--layer", metavar="N", type=whole_number, default=0)
    parser.add_argument("--head", metavar="N", type=whole_number, default=0)
    parser.add_argument(
        "--web", action="store_true", help="serve the interface to a browser on this machine"
    )
    parser.add_argument("--port", type=whole_number, default=8422, help="of --web (default: 8422)")
    parser.set_defaults(run=run)


def whole_number(text: str) -> int:
    """Read a whole number from 0 on from a flag."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Open what the flags name."""
    if args.web:
        from flexinspect.commands.web import serve

        return serve(args.trace, args.port, _place_words(args))
    return open_trace_file(args.trace, _place(args))


def open_trace_file(trace: Path, place: Place | None = None) -> int:
    """Open the interface on a trace, finished or growing."""
    _need_a_terminal(trace)
    from flexinspect.app import InspectorApp

    return _show(InspectorApp(trace, place=place, keymap=_keymap()))


def _place_words(args: argparse.Namespace) -> list[str]:
    """Return the flags of a place as they were given, for the interface in a browser."""
    given = {name: getattr(args, name) for name in ("generation", "step", "layer", "head")}
    return [word for name, n in given.items() if n for word in (f"--{name}", str(n))]


def _place(args: argparse.Namespace) -> Any:
    from flexinspect.panels.base import Place

    if args.generation is None and args.step is None and not (args.layer or args.head):
        return None
    return Place(args.generation or 0, 0, args.step or 0, args.layer, args.head)


def start() -> int:
    """Show the start screen."""
    from flexinspect.app import InspectorApp
    from flexinspect.commands.run import job_from_words

    return _finish(InspectorApp(keymap=_keymap(), job_of=job_from_words))


def inspect_run(job: Job | ScriptJob) -> int:
    """Run a job under the interface, then print its result.

    Our own generation keeps its model until the interface closes, for restores and forks.
    """
    from flexinspect.app import InspectorApp
    from flexinspect.job import Job

    held = replace(job, hold=True) if isinstance(job, Job) else job
    return _finish(InspectorApp(job=held, keymap=_keymap()))


def _keymap() -> dict[str, str]:
    from flexinspect.config import load_config

    return dict(load_config().keys)


def _need_a_terminal(trace: Path) -> None:
    served = "TEXTUAL_DRIVER" in os.environ  # in a browser, see web.py
    if not served and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "The interface needs a terminal, and there is none here.",
            hint=f"Without one: flexinspect show {trace}, or flexinspect dump {trace}.",
        )


def _show(app: InspectorApp) -> int:
    """Run the interface; a trace that could not be read makes it end with that error."""
    app.run()
    if app.trouble is not None:
        raise app.trouble
    return app.return_code or 0


def _finish(app: InspectorApp) -> int:
    """Run the interface; if it began a run, let that end and print its result."""
    try:
        code = _show(app)
    finally:
        feed = app.feed
        process = feed.process if feed is not None else None
        if feed is not None and feed.exit_code is None and not (feed.detached or feed.ending):
            feed.interrupt()
    if process is None:
        return code
    if feed is not None and feed.detached:
        print(f"The run goes on; see it again with: flexinspect attach {process.pid}")
        return 0
    for text in app.feed.prints if app.feed is not None else ():
        print(visible(text), file=sys.stderr)  # what the user's own code printed meanwhile
    process.show_output()
    from flexinspect.commands.live import conclude_run

    return conclude_run(process, code, stopping=app.feed is not None and app.feed.stopping)
