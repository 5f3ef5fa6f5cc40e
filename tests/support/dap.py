"""A client of the Debug Adapter Protocol, as an editor has one: framing, requests, events."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

TIMEOUT_S = 120.0

SETTLE_S = 1.0
"""How long an adapter is left alone after a client has gone.

debugpy 1.8.22 notifies its oldest session of each new client. While a client of that session that
was cut off is being removed, this ends the accepting thread with an exception, and no client is
answered after that.
"""

Message = dict[str, Any]


class DapError(Exception):
    """A request was refused, or the other side is gone."""


class DapClient:
    """One connection to a debug adapter on a socket."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.settimeout(None)
        self._seq = 0
        self._sending = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._events: list[Message] = []
        self._news = threading.Condition()
        self.n_bytes: dict[str, int] = {}
        """Size of the newest answer to each command."""
        self.is_gone = False
        self.on_request: Callable[[Message], Message] | None = None
        """Answers the adapter's own requests (runInTerminal)."""
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the wire --------------------------------------------------------------------------------

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request and return the body of its answer."""
        return self.answer(self.send(command, **arguments))

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request and return its number; the answer is read separately."""
        self._seq += 1
        seq = self._seq
        self._answers[seq] = queue.SimpleQueue()
        self._write({"seq": seq, "type": "request", "command": command, "arguments": arguments})
        return seq

    def answer(self, seq: int) -> Message:
        """Return the body of the answer to a request."""
        try:
            message = self._answers[seq].get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise DapError(f"request {seq} was not answered") from None
        del self._answers[seq]
        if not message["success"]:
            raise DapError(f"{message['command']}: {message.get('message')}")
        return message.get("body") or {}

    def _write(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._sending:
            self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)

    def _read(self) -> None:
        stream = self._socket.makefile("rb")
        with suppress(OSError, ValueError):
            while (length := _header(stream)) is not None:
                self._take(json.loads(stream.read(length)), length)
        with self._news:
            self.is_gone = True
            self._news.notify_all()

    def _take(self, message: Message, length: int) -> None:
        if message["type"] == "response":
            self.n_bytes[message["command"]] = length
            waiting = self._answers.get(message["request_seq"])
            if waiting is not None:
                waiting.put(message)
        elif message["type"] == "event":
            with self._news:
                self._events.append(message)
                self._news.notify_all()
        elif self.on_request is not None:
            body = self.on_request(message)
            self._seq += 1
            head = {"seq": self._seq, "type": "response", "success": True}
            self._write(
                {**head, "request_seq": message["seq"], "command": message["command"], "body": body}
            )

    def event(self, kind: str, timeout: float | None = None) -> Message:
        """Wait for an event of a kind, take it, and return its body."""
        end = time.monotonic() + (TIMEOUT_S if timeout is None else timeout)
        with self._news:
            while True:
                for event in self._events:
                    if event["event"] == kind:
                        self._events.remove(event)
                        return event.get("body") or {}
                left = end - time.monotonic()
                if left <= 0 or (self.is_gone and kind != "terminated"):
                    seen = [event["event"] for event in self._events]
                    raise DapError(f"no event {kind!r} came; others: {seen}")
                self._news.wait(left)

    # -- a session -------------------------------------------------------------------------------

    def begin(
        self, configuration: Mapping[str, Any], breakpoints: Mapping[Path, list[int]]
    ) -> list[bool]:
        """Attach or launch by a configuration of launch.json, with source breakpoints.

        Returns which breakpoints were verified, in order.
        """
        self.request(
            "initialize",
            clientID="test",
            adapterID="debugpy",
            linesStartAt1=True,
            columnsStartAt1=True,
            pathFormat="path",
            supportsRunInTerminalRequest=True,
            supportsVariableType=True,
            supportsStartDebuggingRequest=False,
        )
        begun = self.send(configuration["request"], **configuration)
        self.event("initialized")
        verified = []
        for path, lines in breakpoints.items():
            places = [{"line": line} for line in lines]
            body = self.request("setBreakpoints", source={"path": str(path)}, breakpoints=places)
            verified += [each["verified"] for each in body["breakpoints"]]
        self.request("configurationDone")
        self.answer(begun)
        return verified

    def stopped(self) -> tuple[int, list[Message]]:
        """Wait for a stop; returns its thread and stack, the innermost frame first."""
        thread = self.event("stopped")["threadId"]
        return thread, self.stack(thread)

    def stack(self, thread: int) -> list[Message]:
        """Return the stack of a stopped thread."""
        frames: list[Message] = self.request("stackTrace", threadId=thread)["stackFrames"]
        return frames

    def variables(self, frame: Message) -> dict[str, Message]:
        """Return the local variables of a frame by name."""
        scopes = self.request("scopes", frameId=frame["id"])["scopes"]
        found = self.children(scopes[0]["variablesReference"])
        return {each["name"]: each for each in found}

    def children(self, reference: int) -> list[Message]:
        """Return what unfolds."""
        found: list[Message] = self.request("variables", variablesReference=reference)["variables"]
        return found

    def evaluate(self, text: str, frame: Message, context: str = "watch") -> str:
        """Return the value of an expression in a frame."""
        body = self.request("evaluate", expression=text, frameId=frame["id"], context=context)
        return str(body["result"])

    def leave(self) -> None:
        """End the session as an editor does, and wait until the adapter has closed it."""
        with suppress(DapError, OSError):  # it may have left already
            self.request("disconnect", terminateDebuggee=False)
        with self._news:
            self._news.wait_for(lambda: self.is_gone, TIMEOUT_S)

    def close(self) -> None:
        """Cut the connection, as an editor that was killed does, and let the adapter see it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        time.sleep(SETTLE_S)


def _header(stream: Any) -> int | None:
    length = None
    while (line := stream.readline().strip()) or length is None:
        if not line:
            return None
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return length
