"""The client of a capture's control server, used by the command line, the interface and tests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flexinspect.control import messages
from flexinspect.control.discovery import Address
from flexinspect.control.messages import CommandResponse, StatusResponse
from flexinspect.core.errors import ControlError
from flexinspect.core.parsing import parse_json

TIMEOUT_S = 10.0
"""How long to wait for a response. Commands never wait for the model, so a response is immediate
unless a debugger has stopped the process."""

POLL_INTERVAL_S = 0.02
T = TypeVar("T")


class ControlClient:
    """Commands to one running capture. Each call opens its own connection, so clients can share it.

    Every method raises `ControlError`: with the message of the capture when it refuses the command,
    or with the reason why the capture cannot be reached.
    """

    def __init__(self, address: Address, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def status(self) -> StatusResponse:
        """Return the status of the capture."""
        return self._request(StatusResponse, "GET", "/status")

    def breakpoints(self) -> Sequence[messages.BreakpointInfo]:
        """Return the breakpoints of the capture."""
        return self._request(messages.Breakpoints, "GET", "/breakpoints").breakpoints

    def pause(self) -> CommandResponse:
        """Pause after the current step."""
        return self._command("/pause")

    def continue_(self) -> CommandResponse:
        """Continue. A run that `--hold` keeps alive ends."""
        return self._command("/continue")

    def step(self, n: int = 1) -> CommandResponse:
        """Run `n` steps, then pause."""
        return self._command("/step", messages.StepBody(n))

    def run_to(self, step: int, generation: int | None = None) -> CommandResponse:
        """Run until `step` of `generation` (default: the current one) has finished, then pause."""
        return self._command("/run-to", messages.RunToBody(step, generation))

    def stop(self) -> CommandResponse:
        """End the run after the current step, as Ctrl-C does."""
        return self._command("/stop")

    def level(self, name: str) -> CommandResponse:
        """Record at level `name` from the next step on."""
        return self._command("/level", {"level": name})

    def layers(self, text: str) -> CommandResponse:
        """Choose the layers whose activations level extreme stores: "0,3,5-7" or "all"."""
        return self._command("/layers", messages.LayersBody(text))

    def rewind(self, command: messages.RewindCommand) -> CommandResponse:
        """Restore a step and pause there, or continue from it as a new branch.

        The progress is in the status as `last_rewind`. With `dry_run` nothing is done, and `cost`
        of the response is an estimate.
        """
        return self._command(f"/{command.kind}", command)

    def add_breakpoint(
        self, text: str, *, hits: int = 0, once: bool = False, log_only: bool = False
    ) -> messages.BreakpointInfo:
        """Add a breakpoint."""
        body = messages.BreakpointBody(text, hits, once, log_only)
        return self._request(messages.BreakpointInfo, "POST", "/breakpoints", body)

    def remove_breakpoint(self, number: int) -> Sequence[messages.BreakpointInfo]:
        """Remove a breakpoint and return the remaining ones."""
        return self._request(messages.Breakpoints, "DELETE", f"/breakpoints/{number}").breakpoints

    def enable_breakpoint(self, number: int, on: bool = True) -> messages.BreakpointInfo:
        """Enable a breakpoint, or disable it with `on=False`."""
        verb = "enable" if on else "disable"
        return self._request(messages.BreakpointInfo, "POST", f"/breakpoints/{number}/{verb}")

    def _command(self, path: str, body: Any = None) -> CommandResponse:
        return self._request(CommandResponse, "POST", path, body)

    def _request(self, kind: type[T], method: str, path: str, body: Any = None) -> T:
        return messages.from_json(kind, self.request(method, path, body), "The response")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request and return its JSON. Raises `ControlError`."""
        headers = {"Content-Type": "application/json"}
        if token := self.address.token:
            if not token.isascii() or not token.isprintable():
                what = "The token has characters that a token cannot contain."
                hint = "Copy the one that --serve printed, without a line break."
                raise ControlError(what, hint=hint)
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(messages.to_json(body))
        connection = self._connection()
        try:
            if self.address.socket:
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(self._timeout_s)
                connection.sock.connect(self.address.socket)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return _parse_response(response.status, response.read())
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            # UnicodeError: a host name that IDNA cannot encode.
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.address.socket:
            return http.client.HTTPConnection("localhost", timeout=self._timeout_s)
        try:
            parts = urlsplit(self.address.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme != "http":
            text = f"{self.address.url or 'An empty string'} is not the URL of a capture."
            raise ControlError(text, hint="It looks like http://127.0.0.1:8421; --serve prints it.")
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _unreachable(self, error: Exception) -> ControlError:
        where = self.address.url or self.address.socket
        if isinstance(error, TimeoutError):
            hint = "A debugger may have stopped its process: continue in the debugger."
            return ControlError(f"The capture at {where} does not answer.", hint=hint)
        text = f"No capture responds at {where}: {getattr(error, 'strerror', None) or error}."
        hint = "It may have ended; flexinspect attach --list shows the running captures."
        return ControlError(text, hint=hint)


def _parse_response(status: int, data: bytes) -> Any:
    try:
        payload = parse_json(data)
    except ValueError as error:
        raise ControlError(f"The response is not from a capture: {data[:80]!r}.") from error
    if status < 400:
        return payload
    if not isinstance(payload, dict) or "error" not in payload:
        raise ControlError(f"The capture responded with HTTP status {status} and no message.")
    refusal = messages.from_json(messages.ErrorResponse, payload, "The response")
    raise ControlError(refusal.error, hint=refusal.hint)


def wait_for_effect(client: ControlClient, response: CommandResponse) -> StatusResponse | None:
    """Wait until a command has taken effect; return the status, None when the run has ended.

    A restore, fork or edit has taken effect when it is done or failed and the pause that it ends in
    is reached, or the model is held again. Raises `ControlError` when the capture is there and does
    not respond.
    """
    status = response.status
    while _is_pending(status, response):
        time.sleep(POLL_INTERVAL_S)
        try:
            status = client.status()
        except ControlError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # the process is alive but stopped
            return None  # a run that ends closes its socket without a last status
    return status


def _is_pending(status: StatusResponse, response: CommandResponse) -> bool:
    rewind = status.last_rewind
    if (
        rewind is not None
        and rewind.number == response.rewind_number
        and rewind.state in ("waiting", "working")
    ):
        return True
    # A held model generates the branch to its end, and is held again.
    was_held = response.rewind_number is not None and response.status.state == "holding"
    return (was_held or bool(status.until)) and status.state in ("loading", "running", "pausing")
