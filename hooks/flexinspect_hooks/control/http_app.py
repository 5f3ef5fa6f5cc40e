"""The Starlette application of the control server, the guard in front of it, and uvicorn.

Every error response is an `ErrorResponse` in JSON. Uvicorn is adapted to run beside a model: no
timer, no log lines, no idle connections. Only the server thread imports this module, so that its
libraries neither delay nor end the run.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexinspect.control.discovery import ServeOptions
from flexinspect.control.messages import (
    BreakpointInfo,
    Breakpoints,
    ErrorResponse,
    from_json,
    to_json,
)
from flexinspect.core import __version__
from flexinspect.core.addresses import is_loopback
from flexinspect.core.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.http_routes import (
    PARAMETERS,
    ROUTES,
    HttpError,
    Route,
    RouteHandlers,
)

MAX_BODY_BYTES = 64 << 10
"""Largest body of a request, in bytes."""

MAX_PATH_LENGTH = 256
"""Longest path of a request, in characters."""

_HOST_HINT = "Use the address that the server listens on."
_TOKEN_HINT = (
    "Send the header 'Authorization: Bearer TOKEN' (flexinspect ctl reads the token from "
    "FLEXINSPECT_TOKEN); --serve prints the token."
)


def make_app(handlers: RouteHandlers, serving: ServeOptions | None) -> ASGIApp:
    """Return the application of one socket; over TCP every request needs the token of `serving`."""
    routes = [StarletteRoute("/openapi.json", _openapi, methods=["GET"])]
    for route in ROUTES:
        path = route.path.replace("{number}", "{number:int}")  # it matches digits only
        routes.append(StarletteRoute(path, _endpoint(route, handlers), methods=[route.method]))
    on_error: Any = dict.fromkeys((HTTPException, FlexInspectError, Exception), _on_error)
    return _Guard(Starlette(routes=routes, exception_handlers=on_error), serving)


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi_document())


def _endpoint(route: Route, handlers: RouteHandlers) -> Callable[[Request], Awaitable[Response]]:
    handle = getattr(handlers, route.handler)

    async def endpoint(request: Request) -> Response:
        args = list(request.path_params.values())
        if route.body is not None:
            args.append(_parse_body(route.body, await request.body()))
        return JSONResponse(to_json(handle(*args)))

    return endpoint


def _parse_body(kind: type[Any], data: bytes) -> Any:
    try:
        return from_json(kind, msgspec.json.decode(data))
    except ControlError as error:
        raise HttpError(400, error.message, hint=error.hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is not JSON: {error}") from error


def _error_response(
    status: int, error: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(to_json(ErrorResponse(error, hint)), status, headers=headers)


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the response to an error; 409 is for a command that is not possible now."""
    if isinstance(error, HTTPException):
        message = f"There is no route {request.method} {request.url.path}."
        hint = "GET /openapi.json lists all routes."
        return _error_response(error.status_code, message, hint, error.headers)
    if isinstance(error, FlexInspectError):
        return _error_response(getattr(error, "status", 409), error.message, error.hint)
    return _error_response(500, f"The control server failed: {type(error).__name__}: {error}")


class _Guard:
    """Middleware that refuses requests which are too large or not allowed.

    A body without a Content-Length is read up to `MAX_BODY_BYTES`. A page in the user's browser can
    send requests here under its own host name if that name resolves to this machine (DNS
    rebinding); then the Host header is not one of `_allowed_hosts`.
    """

    def __init__(self, app: ASGIApp, serving: ServeOptions | None) -> None:
        self._app, self._token = app, serving.token.encode() if serving is not None else b""
        self._hosts = _allowed_hosts(serving.host) if serving is not None else set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if self._token:
                self._check_access(scope)
            if len(scope["path"]) > MAX_PATH_LENGTH:  # `int` would parse a number of any length
                raise HttpError(414, f"The path is longer than {MAX_PATH_LENGTH} characters.")
            size = _header(scope, b"content-length") or "0"
            if not size.isdecimal() or int(size) > MAX_BODY_BYTES:
                raise _too_large()
        except HttpError as error:
            headers = {"Connection": "close"}
            refusal = _error_response(error.status, error.message, error.hint, headers)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, _limited(receive), send)

    def _check_access(self, scope: Scope) -> None:
        host = _header(scope, b"host")
        before, _, port = host.rpartition(":")
        name = before if port.isdigit() else host
        if name.strip("[]").lower() not in self._hosts:
            raise HttpError(403, "The Host header does not name this server.", hint=_HOST_HINT)
        scheme, _, token = _header(scope, b"authorization").partition(" ")
        received = token.strip().encode("latin-1", "replace")
        if not hmac.compare_digest(received, self._token) or scheme.lower() != "bearer":
            raise HttpError(401, "The token is missing or wrong.", hint=_TOKEN_HINT)


def _too_large() -> HttpError:
    return HttpError(413, f"The body is larger than {MAX_BODY_BYTES >> 10} KiB.")


def _limited(receive: Receive) -> Receive:
    n = 0

    async def counted() -> Message:
        nonlocal n
        message = await receive()
        n += len(message.get("body", b""))
        if n > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


def _header(scope: Scope, name: bytes) -> str:
    """Return a header of a request, empty if it is missing or repeated."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _allowed_hosts(host: str) -> set[str]:
    """Return the names, in lower case, that the Host header may have for a server on `host`."""
    names = {host, "localhost", "127.0.0.1"}
    if is_loopback(host):
        return {name.lower() for name in (*names, "::1")}
    with suppress(OSError):
        names |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return {name.lower() for name in (*names, socket.gethostname())}


# -- the OpenAPI document --------------------------------------------------------------------------

ERROR_STATUSES: Mapping[int, str] = {
    400: "The request is not valid.",
    401: "The token is missing or wrong (only over TCP).",
    403: "The Host header does not name this server (only over TCP).",
    404: "There is no such route, breakpoint or level.",
    405: "The route does not support this method.",
    409: "The command is not possible in the current state.",
    413: "The body is too large.",
}


NUMBERS: Mapping[type[Any], str] = {BreakpointInfo: "id", Breakpoints: "breakpoints/0/id"}
"""Where responses have the number of a breakpoint."""


def openapi_document() -> dict[str, Any]:
    """Return the document as plain data for `json.dumps`."""
    kinds = [ErrorResponse]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        kinds += [route.response, *([route.body] if route.body is not None else [])]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        schema["description"] = inspect.cleandoc(schema["description"])
    refused = {
        f"Refused{n}": {"description": description, **_content(ErrorResponse)}
        for n, description in ERROR_STATUSES.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flexinspect control",
            "version": __version__,
            "description": "Commands to a running capture. Over TCP every request needs the token; "
            "the Unix socket needs none.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": refused,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    refused = {str(n): {"$ref": f"#/components/responses/Refused{n}"} for n in ERROR_STATUSES}
    answer = {"description": "The response.", **_content(route.response)}
    if pointer := NUMBERS.get(route.response):
        answer["links"] = _links(f"$response.body#/{pointer}")
    operation: dict[str, Any] = {
        "operationId": route.handler.rstrip("_"),
        "summary": route.summary,
        "responses": {"200": answer, **refused},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body)}
    if route.parameter is not None:
        name, schema = route.parameter, dict(PARAMETERS[route.parameter])
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return operation


def _links(number: str) -> dict[str, Any]:
    """Return the routes that take the number of a breakpoint, which a response has."""
    names = [each.handler.rstrip("_") for each in ROUTES if each.parameter == "number"]
    return {name: {"operationId": name, "parameters": {"number": number}} for name in names}


def _content(kind: type[Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}


# -- uvicorn beside a model -----------------------------------------------------------------------

_NULL_LOGGER = logging.Logger("flexinspect.control", logging.CRITICAL + 1)
_NULL_LOGGER.addHandler(logging.NullHandler())

IDLE_S = 30
"""How long a connection may be idle, or its request incomplete."""

MOST_CONNECTIONS = 64
"""Connections per socket at a time; more could exhaust the program's file descriptors."""

SHUTDOWN_TIMEOUT_S = 0.5
"""How long the shutdown waits for responses in progress."""


class _EmbeddedProtocol(H11Protocol):
    """HTTP protocol that closes idle connections, and writes nothing to the program's log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _NULL_LOGGER
        self._idle_timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no response is in progress."""
        cycle = self.cycle
        return cycle is None or bool(cycle.more_body) or bool(cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request. Beyond `MOST_CONNECTIONS` the one that is idle longest is closed.

        Connections that send nothing therefore keep nobody out.
        """
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > MOST_CONNECTIONS:
            others = (each for each in self.connections if each is not self)
            idle = [each for each in others if isinstance(each, _EmbeddedProtocol) and each.is_idle]
            min(idle, key=lambda each: each.idle_since, default=self).transport.abort()

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
        self.idle_since = self.loop.time()
        self._idle_timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.is_idle:  # else `on_response_complete` restarts the timer
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
