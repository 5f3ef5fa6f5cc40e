"""`flexinspect open --web`: the same interface in a browser, on this machine only."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flexinspect.errors import UsageError
from flexinspect.text import escape_unprintable

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
