"""The control of a capture: its step barrier, and a server thread with a Unix socket and TCP.

Sockets are bound in the constructor, so that an invalid address is reported before the model loads.
The thread starts later, since importing its libraries takes 0.12 s of Python. Between requests it
sleeps without a timer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.control import discovery
from flexinspect.control.discovery import Address, CaptureEntry, ServeOptions
from flexinspect.control.messages import StepRef
from flexinspect.core.addresses import format_address
from flexinspect.core.errors import ControlError, UsageError
from flexinspect.records.step import EventRecord
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import ControlTargets, FindingCounter
from flexinspect_hooks.control.http_routes import RouteHandlers
from flexinspect_hooks.python_internals.threads import background_thread

if TYPE_CHECKING:
    from flexinspect_hooks.capture.recorder import Recorder

CLOSE_TIMEOUT_S = 1.0
"""How long the end of the process waits for the server thread."""

BACKLOG = 16


class CaptureControl:
    """The step barrier of a capture, and the server of its commands if `is_served`.

    `note` is the reason why there is no server although one was requested. `report` receives that
    reason, or the URL if the capture is served over TCP; it may be called from any thread. Raises
    `UsageError` when the address of `serving` is not available.
    """

    def __init__(
        self,
        targets: ControlTargets,
        report: Callable[[str], None],
        *,
        is_served: bool = True,
        serving: ServeOptions | None = None,
    ) -> None:
        self.targets, self.barrier, self.note = targets, targets.barrier, ""
        self._report, self._serving = report, serving
        self._finding_counter = FindingCounter(targets.trace)
        self._path: Path | None = None
        self._unix: socket.socket | None = None
        self._tcp: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None
        self._thread = background_thread("flexinspect-server", self._run)
        if is_served:
            self._tcp = _bind_tcp(serving) if serving is not None else None
            try:
                self._path = discovery.new_socket_path(discovery.runtime_folder())
                self._unix = _bind_unix(self._path)
            except ControlError as error:
                self.note = error.sentence()
                self.close_sockets()

    @property
    def address(self) -> Address:
        """The address that clients connect to; its URL is empty if it is not served over TCP."""
        if self._tcp is None or self._serving is None:
            return Address(str(self._path))
        address = format_address(*self._tcp.getsockname()[:2])
        return Address(str(self._path), f"http://{address}", self._serving.token)

    def start(self) -> None:
        """Register the capture, and start the thread that serves it."""
        control_protocols.register_counter("general", self._finding_counter)
        if self._unix is not None:
            targets, pid, now = self.targets, os.getpid(), time.time()
            place = targets.trace, targets.title, targets.kind
            try:
                discovery.register(CaptureEntry(pid, now, self.address, *place))
                self._thread.start()
            except ControlError as error:
                self.note = error.sentence()
        if self.note:
            self._report_note()
        elif self._tcp is not None:
            self._report(f"control server at {self.address.url}")

    def _report_note(self) -> None:
        self._report(f"This run cannot be controlled: {self.note}")

    def attach_recorder(self, recorder: Recorder) -> None:
        """Record commands as events of the trace, and let pauses wait for its writer."""

        def record(kind: str, text: str, place: StepRef, facts: Mapping[str, Any]) -> None:
            generation, step = (place.generation, place.step) if place.step >= 0 else (None, None)
            data = {"branch": place.branch, **facts} if place.branch else facts
            recorder.put(EventRecord(kind, text, time.time(), generation, step, data))

        self.barrier.record_event, self.barrier.drain = record, recorder.drain

    def close(self) -> None:
        """Mark the run as finished, end the thread, and remove the socket and its file."""
        self.barrier.finish()
        control_protocols.unregister_counter("general", self._finding_counter)
        if self._path is not None:
            discovery.unregister(self._path)
        with suppress(RuntimeError):  # the thread has ended
            self._end()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close the sockets; the files stay, because in a forked child they are the parent's."""
        for listener in (self._unix, self._tcp):
            if listener is not None:
                with suppress(OSError):
                    listener.close()

    def _run(self) -> None:
        try:
            import asyncio

            asyncio.run(self._serve())
        except Exception as error:  # a failure of the server must not end the run
            assert self._path is not None
            discovery.unregister(self._path)
            self.close_sockets()
            self.note = f"{type(error).__name__}: {error}"
            self._report_note()

    async def _serve(self) -> None:
        import asyncio

        from flexinspect_hooks.control.http_app import make_app, serve

        stop = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        handlers, servers = RouteHandlers(self.targets), []
        for listener, serving in ((self._unix, None), (self._tcp, self._serving)):
            if listener is not None:
                servers.append(serve(make_app(handlers, serving), listener, stop))
        await asyncio.gather(*servers)


def _bind_unix(path: Path) -> socket.socket:
    """Return a listening socket that only this user can open.

    Between `bind` and `chmod` its folder, mode 0700, protects it. Raises `ControlError` where the
    file system does not support sockets.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ControlError(
            f"The socket {path} cannot be created: {error.strerror or error}.",
            hint="Set XDG_RUNTIME_DIR to a short path on a local disk.",
        ) from error
    return listener


def _bind_tcp(serving: ServeOptions) -> socket.socket:
    host, port, _ = serving
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--serve {host}:{port} is not available: {error.strerror or error}.",
            hint="Choose another port, or 0 for a free one.",
        ) from error
    return listener
