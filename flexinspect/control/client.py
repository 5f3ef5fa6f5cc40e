"""The client of a running capture's control server: the command line, the interface and tests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flexinspect.control.discovery import Address
from flexinspect.control.messages import (
    BreakpointBody,
    BreakpointInfo,
    Breakpoints,
    CommandResponse,
    EditBody,
    ErrorResponse,
    ForkBody,
    LayersBody,
    MaskEdit,
    RestoreBody,
    RunToBody,
    StatusResponse,
    StepBody,
    StepRef,
    from_json,
    to_json,
)
from flexinspect.core.errors import ControlError

TIMEOUT_S = 10.0
"""How long an answer is waited for. Commands never wait for the model, so it comes at once, but for
a process that a debugger holds."""

T = TypeVar("T")


class ControlClient:
    """Commands to one running capture. One connection per call, so that many may talk to it.

    Every method raises `ControlError`: with the capture's own sentence when it refuses, or saying
    that it cannot be reached.
    """

    def __init__(self, address: Address, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s

    # -- looking ---------------------------------------------------------------------------------

    def status(self) -> StatusResponse:
        """Return how the capture stands."""
        return self._request(StatusResponse, "GET", "/status")

    def breakpoints(self) -> Sequence[BreakpointInfo]:
        """Return its breakpoints."""
        return self._request(Breakpoints, "GET", "/breakpoints").breakpoints

    # -- commands --------------------------------------------------------------------------------

    def pause(self) -> CommandResponse:
        """Pause after this step."""
        return self._request(CommandResponse, "POST", "/pause")

    def continue_(self) -> CommandResponse:
        """Go on; a run that is held ends."""
        return self._request(CommandResponse, "POST", "/continue")

    def step(self, n: int = 1) -> CommandResponse:
        """Go on for `n` steps, then pause."""
        return self._request(CommandResponse, "POST", "/step", StepBody(n))

    def run_to(self, step: int, generation: int | None = None) -> CommandResponse:
        """Go on until a step has finished, of the current generation unless another is named."""
        return self._request(CommandResponse, "POST", "/run-to", RunToBody(step, generation))

    def stop(self) -> CommandResponse:
        """End the run after this step, as Ctrl-C does."""
        return self._request(CommandResponse, "POST", "/stop")

    def level(self, name: str) -> CommandResponse:
        """Record at another level from the next step on."""
        return self._request(CommandResponse, "POST", "/level", {"level": name})

    def layers(self, text: str) -> CommandResponse:
        """Store the activations of other layers at level extreme, "0,3,5-7" or "all"."""
        return self._request(CommandResponse, "POST", "/layers", LayersBody(text))

    def restore(self, place: StepRef, *, dry_run: bool = False) -> CommandResponse:
        """Rebuild the live state after a step and pause there; its order is in the status.

        With `dry_run` nothing is done; the answer's `cost` says what it would cost.
        """
        return self._request(CommandResponse, "POST", "/restore", RestoreBody(place, dry_run))

    def fork(
        self,
        place: StepRef,
        *,
        token_id: int | None = None,
        text: str | None = None,
        stay_paused: bool = False,
        dry_run: bool = False,
    ) -> CommandResponse:
        """Go on from a step with another token, or a text, as a new branch."""
        body = ForkBody(place, token_id, text, stay_paused, dry_run)
        return self._request(CommandResponse, "POST", "/fork", body)

    def edit_mask(
        self,
        place: StepRef,
        edits: Sequence[MaskEdit],
        *,
        stay_paused: bool = False,
        dry_run: bool = False,
    ) -> CommandResponse:
        """Go on from a step with another mask, as a new branch."""
        body = EditBody(place, tuple(edits), stay_paused, dry_run)
        return self._request(CommandResponse, "POST", "/edit", body)

    # -- breakpoints -----------------------------------------------------------------------------

    def add_breakpoint(
        self, text: str, *, hits: int = 0, once: bool = False, log_only: bool = False
    ) -> BreakpointInfo:
        """Set a breakpoint."""
        body = BreakpointBody(text, hits, once, log_only)
        return self._request(BreakpointInfo, "POST", "/breakpoints", body)

    def remove_breakpoint(self, number: int) -> Sequence[BreakpointInfo]:
        """Remove one; returns those that are left."""
        return self._request(Breakpoints, "DELETE", f"/breakpoints/{number}").breakpoints

    def enable_breakpoint(self, number: int, on: bool = True) -> BreakpointInfo:
        """Switch one on, or off."""
        verb = "enable" if on else "disable"
        return self._request(BreakpointInfo, "POST", f"/breakpoints/{number}/{verb}")

    # -- the connection --------------------------------------------------------------------------

    def _request(self, kind: type[T], method: str, path: str, body: Any = None) -> T:
        return from_json(kind, self.request(method, path, body), "the answer")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request and return its JSON. Raises `ControlError`."""
        headers = {"Content-Type": "application/json"}
        if token := self.address.token:
            if not token.isascii() or not token.isprintable():
                raise ControlError(
                    "The token holds characters that no capture's token has.",
                    hint="Copy the one that --serve printed, without a line break.",
                )
            headers["Authorization"] = f"Bearer {token}"
        text = None if body is None else json.dumps(to_json(body))
        connection = self._connect()
        try:
            connection.request(method, path, body=text, headers=headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # a host's name, too
            raise self._unreachable(error) from error
        finally:
            connection.close()
        return _parse_response(status, data)

    def _connect(self) -> http.client.HTTPConnection:
        if self.address.socket:
            return _UnixConnection(self.address.socket, self._timeout_s)
        parts = urlsplit(self.address.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme != "http" or not host:
            raise ControlError(
                f"{self.address.url or 'An empty text'} is not the URL of a capture.",
                hint="It looks like http://127.0.0.1:8421; --serve prints it.",
            )
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _unreachable(self, error: Exception) -> ControlError:
        where = self.address.url or self.address.socket
        if isinstance(error, TimeoutError):
            return ControlError(
                f"The capture at {where} does not answer.",
                hint="A debugger may hold its process: let that go on.",
            )
        return ControlError(
            f"No capture answers at {where}: {getattr(error, 'strerror', None) or error}.",
            hint="It may have ended; flexinspect attach --list shows those that run.",
        )


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _parse_response(status: int, data: bytes) -> Any:
    try:
        said = json.loads(data)
    except ValueError as error:
        raise ControlError(f"What answered is no capture: {data[:80]!r}.") from error
    if status < 400:
        return said
    if not isinstance(said, dict) or "error" not in said:
        raise ControlError(f"The capture answered with an error of its own: {status}.")
    refusal = from_json(ErrorResponse, said, "the answer")
    raise ControlError(refusal.error, hint=refusal.hint)


POLL_INTERVAL_S = 0.02


def wait_for_effect(client: ControlClient, answer: CommandResponse) -> StatusResponse | None:
    """Return the status once nothing is on its way any more, None when the run has ended by then.

    An order counts when it is done or failed, and then the pause that it ends in. Raises
    `ControlError` when the capture is there and does not answer.
    """
    status = answer.status
    while _is_pending(status, answer):
        time.sleep(POLL_INTERVAL_S)
        try:
            status = client.status()
        except ControlError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # it is there, and something holds it
            return None  # a run that ends does not say so any more
    return status


def _is_pending(status: StatusResponse, answer: CommandResponse) -> bool:
    order = status.last_rewind
    if (
        answer.rewind_number is not None
        and order is not None
        and order.number == answer.rewind_number
    ):
        if order.state in ("waiting", "working"):
            return True
        return status.state == "pausing"
    return bool(status.until) and status.state in ("loading", "running", "pausing")
