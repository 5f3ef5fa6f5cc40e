"""Uvicorn inside somebody else's program: it says nothing, handles no signal and has no clock."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_SILENT = logging.Logger("flexinspect.control", logging.CRITICAL + 1)
_SILENT.addHandler(logging.NullHandler())

IDLE_S = 30
"""How long a connection may be idle."""

LAST_WORDS_S = 0.5
"""How long the end waits for answers."""


class _SilentProtocol(H11Protocol):
    """HTTP that does not tell the program's log what strangers send."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _SILENT


class _SleepingServer(uvicorn.Server):
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
        state, until = self.server_state, time.monotonic() + LAST_WORDS_S
        while state.tasks and time.monotonic() < until:
            await asyncio.sleep(0.002)


async def serve(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Answer what comes through a listening socket until `stop` is set."""
    config = uvicorn.Config(
        app,
        http=_SilentProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
    )
    await _SleepingServer(config, stop).serve([listening])
