"""The control server: one thread of the capture process, one Unix socket, TCP when asked for.

Sockets are bound at once, so that what is wrong with an address is said before anything loads; the
thread that answers starts later, since loading its libraries takes a tenth of a second of Python.
While nobody asks it sleeps: it has no clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexinspect.control.discovery import (
    Address,
    CaptureEntry,
    ServeOptions,
    new_socket_path,
    register,
    runtime_folder,
    unregister,
)
from flexinspect.core.errors import ControlError, UsageError
from flexinspect_hooks.control.handlers import CaptureInfo, RouteHandlers
from flexinspect_hooks.control.targets import ControlTargets
from flexinspect_hooks.interpreter.threads import keep_running_when_stopped

CLOSE_TIMEOUT_S = 1.0
"""How long the end of the process waits for answers that are on their way."""

BACKLOG = 16


class ControlServer:
    """Serves the commands of one capture until it is closed.

    Raises `UsageError` when the TCP address cannot be had, `ControlError` when there is no folder
    for the Unix socket, or none can be made in it.
    """

    def __init__(
        self, targets: ControlTargets, info: CaptureInfo, serving: ServeOptions | None = None
    ) -> None:
        self._targets, self._info, self._serving = targets, info, serving
        self._tcp = _bind_tcp(serving) if serving is not None else None
        try:
            self._path = new_socket_path(runtime_folder())
            self._unix = _bind_unix(self._path)
        except ControlError:
            if self._tcp is not None:
                self._tcp.close()
            raise
        self._file: Path | None = None
        self._stop: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        server = threading.Thread(target=self._run, name="flexinspect-server", daemon=True)
        self._thread = keep_running_when_stopped(server)
        self._on_failure: Callable[[Exception], None] = lambda _: None

    @property
    def address(self) -> Address:
        """Where it listens."""
        if self._tcp is None or self._serving is None:
            return Address(str(self._path))
        host, port = self._tcp.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return Address(str(self._path), f"http://{name}:{port}", self._serving.token)

    def start(self, on_failure: Callable[[Exception], None] = lambda _: None) -> None:
        """Let the capture be found, and answer from a thread of its own.

        `failed` is told there if it cannot answer; the capture is not found any more then.
        """
        self._on_failure = on_failure
        about = self._info
        entry = CaptureEntry(
            os.getpid(), time.time(), self.address, about.trace, about.title, about.kind
        )
        self._file = register(entry)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove what lies in the folder."""
        if self._file is not None:
            unregister(self._file)
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._close_sockets()
        with suppress(OSError):
            self._path.unlink()

    def close_in_child(self) -> None:
        """Let go of the sockets: this is a forked child, and the capture is its parent's."""
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (self._unix, self._tcp):
            if one is not None:
                with suppress(OSError):
                    one.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            import asyncio

            asyncio.run(self._serve())
        except Exception as error:  # whatever is wrong with the server, the run goes on
            if self._file is not None:
                unregister(self._file)
            self._close_sockets()
            self._on_failure(error)

    async def _serve(self) -> None:
        import asyncio

        from flexinspect_hooks.control.http_app import (
            NetworkGuard,
            SizeGuard,
            allowed_hosts,
            make_app,
        )

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app: Any = SizeGuard(make_app(RouteHandlers(self._targets, self._info)))
        served = [serve(app, self._unix, self._stop)]
        if self._tcp is not None and self._serving is not None:
            hosts = allowed_hosts(self._serving.host)
            guarded = NetworkGuard(app, self._serving.token, hosts)
            served.append(serve(guarded, self._tcp, self._stop))
        await asyncio.gather(*served)


def _bind_unix(path: Path) -> socket.socket:
    """Return a socket that only this user can open, listening.

    Its folder, which nobody else may enter, guards it from its first moment on. Raises
    `ControlError` where the file system takes no sockets.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(str(path))
        path.chmod(0o600)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ControlError(
            f"The socket {path} cannot be made: {error.strerror or error}.",
            hint="Set XDG_RUNTIME_DIR to a short path on a local disk.",
        ) from error
    return found


def _bind_tcp(serving: ServeOptions) -> socket.socket:
    host, port = serving.host, serving.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--serve {host}:{port} cannot be had: {error.strerror or error}.",
            hint="Choose another port, or 0 for a free one.",
        ) from error
    return found


_NULL_LOGGER = logging.Logger("flexinspect.control", logging.CRITICAL + 1)
_NULL_LOGGER.addHandler(logging.NullHandler())

IDLE_S = 30
"""How long a connection may be idle, or its request incomplete."""

MOST_CONNECTIONS = 64
"""Connections of one socket at a time: whoever opens more than that takes the program's files."""

SHUTDOWN_TIMEOUT_S = 0.5
"""How long the end waits for answers."""


class _EmbeddedProtocol(H11Protocol):
    """HTTP that does not tell the program's log what strangers send, and closes on the silent.

    Uvicorn itself waits for a request for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _NULL_LOGGER
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, unless there are too many who make us wait."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        is_answering = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        if not is_answering:  # else the wait begins anew with the answer
            self.transport.abort()


class _EmbeddedServer(uvicorn.Server):
    """Uvicorn's server without its tick ten times a second, which would take the interpreter."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    async def main_loop(self) -> None:
        """Sleep until the end."""
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the answers that are on their way go out, and no more."""
        for server in self.servers:
            server.close()
        state, until = self.server_state, time.monotonic() + SHUTDOWN_TIMEOUT_S
        while state.tasks and time.monotonic() < until:
            await asyncio.sleep(0.002)


async def serve(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Answer what comes through a listening socket until `stop` is set."""
    config = uvicorn.Config(
        app,
        http=_EmbeddedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
    )
    await _EmbeddedServer(config, stop).serve([listening])
