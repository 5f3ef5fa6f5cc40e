"""The socket between a user's program and whoever started it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from socket import socket
from typing import Any

from flexinspect import protocol


class LauncherConnection:
    """The socket to whoever started us. Lines of the protocol, both ways."""

    def __init__(self, number: int) -> None:
        os.set_inheritable(number, False)
        self._socket = socket(fileno=number)
        self._send_lock = threading.Lock()
        self._lines = self._read()

    def first_line(self) -> str:
        """Return the first line, the job."""
        return next(self._lines, b"").decode()

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the facts of each line until the other side is gone."""
        for line in self._lines:
            facts = protocol.parse_message(line.decode())
            if facts is not None:
                yield facts

    def _read(self) -> Iterator[bytes]:
        """Yield each line, read without Python's buffer: no daemon thread may hold its lock."""
        parts: list[bytes] = []
        with suppress(OSError):
            while piece := self._socket.recv(1 << 16):
                *lines, piece = piece.split(b"\n")
                for line in lines:
                    yield b"".join([*parts, line])
                    parts.clear()
                parts.append(piece)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a line."""
        with suppress(OSError), self._send_lock:
            self._socket.sendall((protocol.format_message(kind, **facts) + "\n").encode())
