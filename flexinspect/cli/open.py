"""`flexinspect open`: the interface on a trace, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from flexinspect.panels.base import TracePlace
    from flexinspect.records.job import Job, ScriptJob
    from flexinspect.tui.app import InspectorApp

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
        return serve(args.trace, args.port, _place_flags(args))
    return open_trace_file(args.trace, _start_place(args))


def open_trace_file(trace: Path, place: TracePlace | None = None) -> int:
    """Open the interface on a trace, finished or growing."""
    _require_terminal(trace)
    from flexinspect.tui.app import InspectorApp

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
    from flexinspect.cli.run import job_from_argv
    from flexinspect.tui.app import InspectorApp

    return _run_app_and_job(InspectorApp(keymap=_keymap(), make_job=job_from_argv))


def inspect_run(job: Job | ScriptJob) -> int:
    """Run a job under the interface, then print its result.

    Our own generation keeps its model until the interface closes, for restores and forks.
    """
    from flexinspect.records.job import Job
    from flexinspect.tui.app import InspectorApp

    held = replace(job, hold=True) if isinstance(job, Job) else job
    return _run_app_and_job(InspectorApp(job=held, keymap=_keymap()))


def _keymap() -> dict[str, str]:
    from flexinspect.inputs.config import load_config

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
    from flexinspect.cli.live_run import conclude_run

    return conclude_run(process, code, stopping=app.session is not None and app.session.is_stopping)


HOST = "127.0.0.1"

_LOCAL_HOSTS = (HOST, "localhost")


def serve(trace: Path, port: int, place: Sequence[str] = ()) -> int:
    """Serve a trace until Ctrl-C; each visitor gets a process of the interface of their own.

    `place` holds the flags that say where it begins.

    Raises `TraceError` for a trace that cannot be read, `UsageError` without the extra or when the
    port is taken.
    """
    from flexinspect.trace.reader import open_trace

    open_trace(trace).close()
    server_class = _server_class()
    _check_port(port)
    # The command goes through a shell: every part of it is quoted.
    words = [sys.executable, "-P", "-m", "flexinspect", "open", str(trace.absolute())]
    words += place
    server = server_class(
        shlex.join(words), host=HOST, port=port, title=f"flexinspect {trace.name}"
    )
    where = f"http://{HOST}:{port}"
    print(
        f"{escape_unprintable(trace.name)} is at {where} until Ctrl-C", file=sys.stderr, flush=True
    )
    server.serve()
    return 0


def _server_class() -> type:
    try:
        from aiohttp import web
        from textual_serve.server import Server
    except ImportError:
        raise UsageError(
            "--web needs the package textual-serve, which is not installed.",
            hint="Install it: pip install 'flexinspect[web]'",
        ) from None

    class LocalServer(Server):  # type: ignore[misc,unused-ignore]
        """Answers pages of this machine only: browsers let any page speak to any web socket."""

        async def _make_app(self) -> web.Application:
            app: web.Application = await super()._make_app()
            app.middlewares.append(_only_from_here)
            return app

    @web.middleware
    async def _only_from_here(request: web.Request, handler: Any) -> web.StreamResponse:
        if not is_local_request(request.headers):
            raise web.HTTPForbidden(text="Only pages of this machine are answered.")
        answer: web.StreamResponse = await handler(request)
        return answer

    return LocalServer


def is_local_request(headers: Mapping[str, str]) -> bool:
    """Tell whether a request was sent to this machine by its name, from a page of this machine.

    A page of another site may send requests here, by a name of its own (DNS rebinding), too.
    """
    names = [urlsplit(f"//{headers.get('Host', '')}").hostname]
    if "Origin" in headers:
        names.append(urlsplit(headers["Origin"]).hostname)
    return all(name in _LOCAL_HOSTS for name in names)


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise UsageError(f"--port {port} is no port; use one from 1 to 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(
                f"Port {port} cannot be used: {reason}.", hint="Choose another one with --port."
            ) from None
