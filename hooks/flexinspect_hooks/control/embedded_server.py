"""Uvicorn adapted to run beside a model: no timer, no log lines, no idle connections.

Only the server thread imports this module, so that uvicorn neither delays nor ends the run.
"""

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
"""Connections per socket at a time; more could exhaust the program's file descriptors."""

SHUTDOWN_TIMEOUT_S = 0.5
"""How long the shutdown waits for responses in progress."""


class _EmbeddedProtocol(H11Protocol):
    """HTTP protocol that closes idle connections and writes nothing to the program's log.

    Uvicorn itself waits for a request without a limit, and logs invalid requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _NULL_LOGGER
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or abort if `MOST_CONNECTIONS` are open."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the idle timer."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        cycle = self.cycle
        is_responding = cycle is not None and not cycle.more_body and not cycle.response_complete
        if not is_responding:  # `on_response_complete` restarts the timer
            self.transport.abort()


class _EmbeddedServer(uvicorn.Server):
    """Uvicorn's server without its ten ticks a second, which would take the GIL from the model."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    async def main_loop(self) -> None:
        """Sleep until `stop` is set."""
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and let responses in progress finish."""
        for server in self.servers:
            server.close()
        state, until = self.server_state, time.monotonic() + SHUTDOWN_TIMEOUT_S
        while state.tasks and time.monotonic() < until:
            await asyncio.sleep(0.002)


async def serve(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve `app` on a listening socket until `stop` is set."""
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
