"""The control server: one thread of the capture process, one Unix socket, TCP when asked for.

Sockets are bound at once, so that what is wrong with an address is said before anything loads; the
thread that answers starts later, since loading its libraries takes a tenth of a second of Python.
While nobody asks it sleeps: it has no clock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.control.addresses import ServeOptions
from flexinspect.control.registry import (
    Address,
    CaptureEntry,
    new_socket_path,
    register,
    runtime_folder,
    unregister,
)
from flexinspect.errors import ControlError, UsageError
from flexinspect_hooks.control.parts import ControlTargets
from flexinspect_hooks.control.verbs import CaptureInfo, RouteHandlers
from flexinspect_hooks.debugging.threads import keep_running_when_stopped

if TYPE_CHECKING:
    import asyncio

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

        from flexinspect_hooks.control.app import make_app
        from flexinspect_hooks.control.guard import NetworkGuard, SizeGuard, allowed_hosts
        from flexinspect_hooks.control.silent import serve

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
