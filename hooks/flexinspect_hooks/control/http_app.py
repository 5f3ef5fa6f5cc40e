"""The Starlette application of the control server, and the guards in front of it.

Every error response is an `ErrorResponse` in JSON.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexinspect.control.discovery import is_loopback
from flexinspect.control.messages import ErrorResponse, from_json, to_json
from flexinspect.core.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.handlers import ROUTES, NotFoundError, Route, RouteHandlers
from flexinspect_hooks.control.openapi import openapi_document

Endpoint = Callable[[Request], Awaitable[Response]]


class _BadRequestError(ControlError):
    """The request body is not valid for the route."""


def make_app(handlers: RouteHandlers) -> Starlette:
    """Return the application without its guards, `SizeGuard` and `NetworkGuard`."""
    routes = [
        StarletteRoute(_starlette_path(route), _endpoint(route, handlers), methods=[route.method])
        for route in ROUTES
    ]
    routes.append(StarletteRoute("/openapi.json", _openapi, methods=["GET"]))
    on_error: Any = {HTTPException: _on_http_error, Exception: _on_server_error}
    return Starlette(routes=routes, exception_handlers=on_error)


def _starlette_path(route: Route) -> str:
    """Return the path in Starlette's syntax; a number parameter matches digits only."""
    return route.path.replace("{number}", "{number:int}")


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi_document())


def _endpoint(route: Route, handlers: RouteHandlers) -> Endpoint:
    handle = route.bind(handlers)

    async def endpoint(request: Request) -> Response:
        try:
            args = list(request.path_params.values())
            if route.body is not None:
                args.append(_parse_body(route.body, await request.body()))
            return JSONResponse(to_json(handle(*args)))
        except TooLargeError as error:
            return _error_response(413, error)
        except _BadRequestError as error:
            return _error_response(400, error)
        except NotFoundError as error:
            return _error_response(404, error)
        except FlexInspectError as error:
            return _error_response(409, error)

    return endpoint


def _parse_body(kind: type[Any], data: bytes) -> Any:
    try:
        return from_json(kind, json.loads(data.decode()))
    except ControlError as error:
        raise _BadRequestError(error.message, hint=error.hint) from error
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"The body is not JSON: {error}") from error


def _error_response(status: int, error: FlexInspectError) -> Response:
    return JSONResponse(to_json(ErrorResponse(error.message, error.hint)), status)


async def _on_server_error(request: Request, error: Exception) -> Response:
    what = f"{type(error).__name__}: {error}"
    return JSONResponse(to_json(ErrorResponse(f"The control server failed: {what}")), 500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = ErrorResponse(
        f"There is no route {request.method} {request.url.path}.",
        "GET /openapi.json lists all routes.",
    )
    return JSONResponse(to_json(response), error.status_code, headers=error.headers)


MAX_BODY_BYTES = 64 << 10
"""Largest body of a request, in bytes."""

MAX_PATH_LENGTH = 256
"""Longest path of a request, in characters."""


class TooLargeError(ControlError):
    """A body is larger than `MAX_BODY_BYTES`."""

    def __init__(self) -> None:
        super().__init__(f"The body is larger than {MAX_BODY_BYTES >> 10} KiB.")


class SizeGuard:
    """Middleware that refuses paths above `MAX_PATH_LENGTH` and bodies above `MAX_BODY_BYTES`.

    A body without a Content-Length is read up to the limit; then the application gets a
    `TooLargeError`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] != "http":
            return
        size = _header(scope, b"content-length")
        if len(scope["path"]) > MAX_PATH_LENGTH:  # `int` would parse a number of any length
            error = ErrorResponse(f"The path is longer than {MAX_PATH_LENGTH} characters.")
            await _send_error(414, error, scope, receive, send)
        elif size is not None and (not size.isdecimal() or int(size) > MAX_BODY_BYTES):
            error = ErrorResponse(TooLargeError().message)
            await _send_error(413, error, scope, receive, send)
        else:
            await self._app(scope, _limited(receive), send)


def _limited(receive: Receive) -> Receive:
    n = 0

    async def counted() -> Message:
        nonlocal n
        message = await receive()
        n += len(message.get("body", b""))
        if n > MAX_BODY_BYTES:
            raise TooLargeError
        return message

    return counted


class NetworkGuard:
    """Middleware that requires the token and a Host header that names this server.

    A page in the user's browser can send requests here under its own host name if that name
    resolves to this machine (DNS rebinding); then the Host header is not one of `hosts`. Requests
    are refused before the application sees them.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] != "http":
            return
        if not self._is_allowed_host(_header(scope, b"host") or ""):
            error = ErrorResponse("The Host header does not name this server.", _HOST_HINT)
            await _send_error(403, error, scope, receive, send)
        elif not self._has_token(_header(scope, b"authorization") or ""):
            error = ErrorResponse("The token is missing or wrong.", _TOKEN_HINT)
            await _send_error(401, error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_allowed_host(self, host: str) -> bool:
        before, _, port = host.rpartition(":")
        name = before if port.isdigit() else host
        return name.strip("[]").lower() in self._hosts

    def _has_token(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        received = token.strip().encode("latin-1", "replace")
        return hmac.compare_digest(received, self._token) and scheme.lower() == "bearer"


_HOST_HINT = "Use the address that the server listens on."
_TOKEN_HINT = (
    "Send the header 'Authorization: Bearer TOKEN' (flexinspect ctl reads the token from "
    "FLEXINSPECT_TOKEN); --serve prints the token."
)


def allowed_hosts(host: str) -> frozenset[str]:
    """Return the names that the Host header may have for a server that listens on `host`."""
    if not is_loopback(host):
        try:
            own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        except OSError:
            own = set()
        return frozenset({host, socket.gethostname(), "localhost", "127.0.0.1", *map(str, own)})
    return frozenset({host, "localhost", "127.0.0.1", "::1"})


def _header(scope: Scope, name: bytes) -> str | None:
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else None


async def _send_error(
    status: int, error: ErrorResponse, scope: Scope, receive: Receive, send: Send
) -> None:
    response: Any = JSONResponse(to_json(error), status, headers={"Connection": "close"})
    await response(scope, receive, send)
