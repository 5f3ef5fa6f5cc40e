"""The client of the capture that writes a trace, found by the trace or by its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from flexinspect.core.errors import ControlError
from flexinspect.trace.file.side_files import read_stop
from flexinspect.tui.trace_session import TraceSession

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import StatusResponse

POLL_TIMEOUT_S = 2.0
"""Timeout of a status request; a capture that answers later is probably stopped."""

T = TypeVar("T")


class CaptureStatus(Struct, frozen=True):
    """State of the capture: `status` is None without a capture and for an unresponsive one.

    `debugger_stop` is a sentence on where a debugger has stopped it, otherwise empty.
    """

    status: StatusResponse | None = None
    is_unresponsive: bool = False
    debugger_stop: str = ""

    @property
    def state(self) -> str:
        """The state of the capture, empty when unknown."""
        return self.status.state if self.status is not None else ""


class CaptureClient:
    """Sends commands to the capture that writes a session's trace.

    Every method may block, so none may be called in the event loop. The modules of control are
    imported on first use: most traces are finished, and have no capture.
    """

    def __init__(self, session: TraceSession) -> None:
        self._session = session
        self._client: ControlClient | None = None

    def client(self) -> ControlClient:
        """Return the client of the capture. Raises `ControlError` when there is none."""
        if self._client is None:
            self._client = self._find_client()
        if self._client is None:
            raise self._no_capture_error()
        return self._client

    def _no_capture_error(self) -> ControlError:
        session = self._session
        if session.process is None or session.exit_code is not None:
            return ControlError(
                "No capture runs behind this trace, so there is no model to command.",
                hint="A run of the interface keeps its model until q; another one needs --hold.",
            )
        if session.is_waiting:
            return ControlError(
                "The run takes no commands yet: it is still loading.",
                hint="A generation takes them once its process is up, a program once a model runs.",
            )
        return ControlError("This run takes no commands: it was started with --no-control.")

    def call(self, command: Callable[[ControlClient], T]) -> T:
        """Run a command of the client. Raises `ControlError`, also for a capture that has ended."""
        try:
            return command(self.client())
        except ControlError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
                self._client = None
                self.client()
            raise

    def poll(self) -> CaptureStatus:
        """Return the state of the capture. Never raises `ControlError`."""
        from flexinspect.control.client import ControlClient

        debugger_stop = self._debugger_stop()
        try:
            client = self.client()
            quick = ControlClient(client.address, timeout_s=POLL_TIMEOUT_S)
            return CaptureStatus(quick.status(), debugger_stop=debugger_stop)
        except ControlError as error:
            is_unresponsive = isinstance(error.__cause__, TimeoutError)
            if not is_unresponsive:
                self._client = None
            return CaptureStatus(is_unresponsive=is_unresponsive, debugger_stop=debugger_stop)

    def _debugger_stop(self) -> str:
        stop = read_stop(self._session.path) if self._session.path is not None else None
        return f"The model is {stop.sentence_without_time()}." if stop is not None else ""

    def _find_client(self) -> ControlClient | None:
        from flexinspect.control.client import ControlClient
        from flexinspect.control.discovery import running

        process, path = self._session.process, self._session.path
        pid = process.pid if process is not None else None
        for entry in running():
            if entry.pid == pid or (path is not None and entry.is_recording(path)):
                return ControlClient(entry.address)
        return None
