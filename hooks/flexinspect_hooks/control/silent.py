"""Uvicorn inside somebody else's program: it says nothing, handles no signal and has no clock."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_NULL_LOGGER = logging.Logger("flexinspect.control", logging.CRITICAL + 1)
_NULL_LOGGER.addHandler(logging.NullHandler())

IDLE_S = 30
"""How long a connection may be idle, or its request incomplete."""

MOST_CONNECTIONS = 64
"""Connections of one socket at a time: whoever opens more than that takes the program's files."""

SHUTDOWN_TIMEOUT_S = 0.5
"""How long the end waits for answers."""


class _EmbeddedProtocol(H11Protocol):
    """HTTP that does not tell the program's log what strangers send, and closes on the silent.

    Uvicorn itself waits for a request for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _NULL_LOGGER
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, unless there are too many who make us wait."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        is_answering = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        if not is_answering:  # else the wait begins anew with the answer
            self.transport.abort()


class _EmbeddedServer(uvicorn.Server):
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
        state, until = self.server_state, time.monotonic() + SHUTDOWN_TIMEOUT_S
        while state.tasks and time.monotonic() < until:
            await asyncio.sleep(0.002)


async def serve(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Answer what comes through a listening socket until `stop` is set."""
    config = uvicorn.Config(
        app,
        http=_EmbeddedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
    )
    await _EmbeddedServer(config, stop).serve([listening])
