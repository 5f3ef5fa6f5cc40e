"""debugpy's adapter as an editor starts it, for configurations that no run listens for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from support.dap import TIMEOUT_S, DapClient
from support.debugged import eventually


@contextmanager
def adapter(env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Yield the port on which an adapter waits for its client."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = int(trial.getsockname()[1])
    command = (sys.executable, "-m", "debugpy.adapter", "--host", "127.0.0.1", "--port", str(port))
    patient = {"DEBUGPY_PROCESS_SPAWN_TIMEOUT": str(TIMEOUT_S)}  # gdb is slow on a busy machine
    process = subprocess.Popen(command, env={**os.environ, **patient, **(env or {})})
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def connected(port: int) -> DapClient:
    """Return a client of the adapter, once that listens."""

    def attempt() -> DapClient | None:
        try:
            return DapClient("127.0.0.1", port)
        except ConnectionRefusedError:
            return None

    client = eventually(attempt)
    assert isinstance(client, DapClient)
    return client
