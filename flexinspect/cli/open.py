"""`flexinspect open`: show a trace in the terminal or in a browser."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flexinspect.cli.flags import (
    add_low_bandwidth_flag,
    add_number_flags,
    add_switches,
    non_negative_int,
)
from flexinspect.cli.interface import open_ranks_of, open_trace_file
from flexinspect.core.addresses import LOOPBACK, bind_problem
from flexinspect.core.environment import require_library
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable

DESCRIPTION = (
    "Open a trace, finished or still being recorded, and step through its tokens. "
    "Of a folder with the traces of a distributed run, the ranks are shown side by side. "
    "'?' shows the keys."
)
EXAMPLES = """\
examples:
  flexinspect open run.flextrace
  flexinspect open run.flextrace --step 12 --layer 3
  flexinspect open run.flextrace --web
  flexinspect open traces/                 # the ranks of a run under torchrun
"""

WEB_PORT = 8422
"""The port of --web unless --port gives another one."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="the trace file, or a folder of ranks"
    )
    add_number_flags(
        parser,
        generation="begin in this generation",
        step="begin at this step",
        layer="begin in this layer (default: 0)",
        head="begin at this query head (default: 0)",
    )
    add_switches(parser, web="serve the interface to a browser on this machine")
    port = f"of --web (default: {WEB_PORT})"
    parser.add_argument("--port", type=non_negative_int, default=WEB_PORT, help=port)
    add_low_bandwidth_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Open the trace, or serve it to a browser until Ctrl-C."""
    names = ("generation", "step", "layer", "head")
    given = {name: n for name in names if (n := getattr(args, name)) is not None}
    if args.web:
        return serve(args.trace, args.port, [f"--{name}={n}" for name, n in given.items()])
    if args.trace.is_dir():
        if given:
            what = f"--{next(iter(given))} is a place in one trace, and {args.trace} is a folder."
            raise UsageError(what, hint="Name the trace of a rank.")
        return open_ranks_of(args.trace)
    return open_trace_file(args.trace, given)


def serve(trace: Path, port: int, place: Sequence[str] = ()) -> int:
    """Serve a trace until Ctrl-C. Each browser page gets its own process of the interface.

    `place` are flags of `flexinspect open`. Raises `TraceError` for a trace that cannot be read,
    and `UsageError` without textual-serve and for a port that is not available.
    """
    from flexinspect.analysis.ranks.rank_run import find_run
    from flexinspect.trace.reader import open_trace

    if trace.is_dir():
        find_run(trace)
    else:
        open_trace(trace).close()
    server_class = _server_class()
    if not 0 < port < 65536:
        raise UsageError(f"--port {port} is not a port number; use one from 1 to 65535.")
    if problem := bind_problem(LOOPBACK, port):
        hint = "Choose another one with --port."
        raise UsageError(f"Port {port} cannot be used: {problem}.", hint=hint)
    # The server runs the command through a shell, so every part of it is quoted.
    command = [sys.executable, "-P", "-m", "flexinspect", "open", str(trace.absolute()), *place]
    title = f"flexinspect {trace.name}"
    server = server_class(shlex.join(command), host=LOOPBACK, port=port, title=title)
    where = f"http://{LOOPBACK}:{port} until Ctrl-C"
    print(f"{escape_unprintable(trace.name)} is at {where}", file=sys.stderr, flush=True)
    server.serve()
    return 0


CLOSE_TIMEOUT_S = 1.0
"""How long the end of --web waits for browsers and viewers before it cuts them off."""


def _server_class() -> type:
    require_library("textual_serve.server", "web", "--web")
    import asyncio

    import psutil  # type: ignore[import-untyped, unused-ignore]
    from aiohttp import web
    from textual_serve.server import Server

    @web.middleware
    async def refuse_other_sites(request: web.Request, handler: Any) -> web.StreamResponse:
        if not is_local_request(request.headers):
            raise web.HTTPForbidden(text="Only pages of this machine are answered.")
        response: web.StreamResponse = await handler(request)
        return response

    class LocalServer(Server):  # type: ignore[misc,unused-ignore]
        """Answers pages of this machine only: browsers let any page connect to any WebSocket.

        On shutdown it tells each viewer to quit, and terminates those that do not.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._viewers: dict[asyncio.Task[Any], web.Request] = {}

        async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
            task = asyncio.current_task()
            assert task is not None
            self._viewers[task] = request
            try:
                response: web.WebSocketResponse = await super().handle_websocket(request)
                return response
            finally:
                del self._viewers[task]

        async def on_shutdown(self, app: web.Application) -> None:
            viewers = dict(self._viewers)
            for task in viewers:
                task.cancel()  # quits the viewer, then closes the web socket
            if viewers:
                await asyncio.wait(viewers, timeout=CLOSE_TIMEOUT_S)
            for request in self._viewers.values():
                if request.transport is not None:
                    request.transport.abort()
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.terminate()

        async def _make_app(self) -> web.Application:
            app: web.Application = await super()._make_app()
            app.middlewares.append(refuse_other_sites)
            return app

    return LocalServer


def is_local_request(headers: Mapping[str, str]) -> bool:
    """Return whether a request addresses this machine by a local name and comes from a local page.

    Both headers are checked: with DNS rebinding, a page of another site reaches this server under
    that site's host name.
    """
    names = [urlsplit(f"//{headers.get('Host', '')}").hostname]
    if "Origin" in headers:
        names.append(urlsplit(headers["Origin"]).hostname)
    return all(name in (LOOPBACK, "localhost") for name in names)
