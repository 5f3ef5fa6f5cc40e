"""The control server: a thread of the capture process, a Unix socket, and TCP on request.

Sockets are bound in the constructor, so that an invalid address is reported before the model loads.
The thread starts later, since importing its libraries takes 0.12 s of Python. Between requests it
sleeps without a timer.
"""

from __future__ import annotations

import os
import socket
import threading
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
from flexinspect_hooks.control.control_protocols import ControlTargets, FindingCounter, Levels
from flexinspect_hooks.control.handlers import CaptureInfo, RouteHandlers
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.python_internals.threads import keep_running_when_stopped

if TYPE_CHECKING:
    from flexinspect.records.job import Job, ScriptJob
    from flexinspect_hooks.capture.recorder import Recorder

CLOSE_TIMEOUT_S = 1.0
"""How long the end of the process waits for the server thread."""

BACKLOG = 16


class ControlServer:
    """Serves the commands of one capture until it is closed.

    Raises `UsageError` when the TCP address is not available, and `ControlError` when the Unix
    socket or its folder cannot be created.
    """

    def __init__(
        self, targets: ControlTargets, info: CaptureInfo, serving: ServeOptions | None = None
    ) -> None:
        self._targets, self._info, self._serving = targets, info, serving
        self._tcp = _bind_tcp(serving) if serving is not None else None
        try:
            self._path = discovery.new_socket_path(discovery.runtime_folder())
            self._unix = _bind_unix(self._path)
        except ControlError:
            if self._tcp is not None:
                self._tcp.close()
            raise
        self._end: Callable[[], object] = lambda: None
        server = threading.Thread(target=self._run, name="flexinspect-server", daemon=True)
        self._thread = keep_running_when_stopped(server)
        self._on_failure: Callable[[Exception], None] = lambda _: None

    @property
    def address(self) -> Address:
        """The address that clients connect to."""
        if self._tcp is None or self._serving is None:
            return Address(str(self._path))
        address = format_address(*self._tcp.getsockname()[:2])
        return Address(str(self._path), f"http://{address}", self._serving.token)

    def start(self, on_failure: Callable[[Exception], None] = lambda _: None) -> None:
        """Register the capture, and start the thread that serves it.

        The thread calls `on_failure` if it fails; the capture is unregistered then.
        """
        self._on_failure, info = on_failure, self._info
        pid, now = os.getpid(), time.time()
        discovery.register(CaptureEntry(pid, now, self.address, info.trace, info.title, info.kind))
        self._thread.start()

    def close(self) -> None:
        """End the thread, and remove the socket and its file."""
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
            discovery.unregister(self._path)
            self.close_sockets()
            self._on_failure(error)

    async def _serve(self) -> None:
        import asyncio

        from flexinspect_hooks.control.embedded_server import serve
        from flexinspect_hooks.control.http_app import allowed_hosts, make_app

        stop = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        handlers = RouteHandlers(self._targets, self._info)
        servers = [serve(make_app(handlers), self._unix, stop)]
        if self._tcp is not None and self._serving is not None:
            app = make_app(handlers, self._serving.token, allowed_hosts(self._serving.host))
            servers.append(serve(app, self._tcp, stop))
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


class CaptureControl:
    """The step barrier of a capture, and the server that controls it if `is_served`.

    `note` is the reason why there is no server although one was requested. `report` receives that
    reason, or the URL if the capture is served over TCP; it may be called from any thread. Raises
    `UsageError` when the address of `serving` is in use.
    """

    def __init__(
        self,
        info: CaptureInfo,
        levels: Levels,
        *,
        is_served: bool,
        serving: ServeOptions | None,
        report: Callable[[str], None],
    ) -> None:
        self._report, self.note = report, ""
        self.barrier = StepBarrier()
        self.targets = ControlTargets(self.barrier, levels)
        self._finding_counter = FindingCounter(info.trace)
        self._server: ControlServer | None = None
        if is_served:
            try:
                self._server = ControlServer(self.targets, info, serving)
            except ControlError as error:
                self.note = error.sentence()

    @property
    def url(self) -> str:
        """The URL over TCP, empty if it is not served over TCP."""
        return self._server.address.url if self._server is not None else ""

    def start(self) -> None:
        """Start the server."""
        control_protocols.register_counter("general", self._finding_counter)
        if self._server is not None:
            try:
                self._server.start(self._on_server_failure)
            except ControlError as error:
                self.note = error.sentence()
        if self.note:
            self._report(f"This run cannot be controlled: {self.note}")
        elif self.url:
            self._report(f"control server at {self.url}")

    def _on_server_failure(self, error: Exception) -> None:
        self.note = f"{type(error).__name__}: {error}"
        self._report(f"This run cannot be controlled: {self.note}")

    def attach_recorder(self, recorder: Recorder) -> None:
        """Record commands as events of the trace, and let pauses wait for its writer."""

        def record(kind: str, text: str, place: StepRef, facts: Mapping[str, Any]) -> None:
            has_step = place.step >= 0
            generation, step = (place.generation, place.step) if has_step else (None, None)
            data = {"branch": place.branch, **facts} if place.branch else facts
            recorder.put(EventRecord(kind, text, time.time(), generation, step, data))

        self.barrier.record_event, self.barrier.drain = record, recorder.drain

    def close(self) -> None:
        """Mark the run as finished, and close the server."""
        self.barrier.finish()
        control_protocols.unregister_counter("general", self._finding_counter)
        if self._server is not None:
            self._server.close()

    def close_in_child(self) -> None:
        """Close the sockets in a forked child; the capture belongs to its parent."""
        if self._server is not None:
            self._server.close_sockets()


def job_control(
    job: Job | ScriptJob, info: CaptureInfo, levels: Levels, report: Callable[[str], None]
) -> CaptureControl:
    """Return the control that a job asks for. Raises `UsageError` as `CaptureControl` does."""
    serving = ServeOptions(*job.serving) if job.serving is not None else None
    return CaptureControl(info, levels, is_served=job.control, serving=serving, report=report)
