"""The Starlette application of the control server, and the guards in front of it.

Every error response is an `ErrorResponse` in JSON.
"""

from __future__ import annotations

import hmac
import inspect
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexinspect.control.messages import ErrorResponse, from_json, to_json
from flexinspect.core import __version__
from flexinspect.core.addresses import is_loopback
from flexinspect.core.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.handlers import ROUTES, NotFoundError, Route, RouteHandlers

Endpoint = Callable[[Request], Awaitable[Response]]


class _BadRequestError(ControlError):
    """The request body is not valid for the route."""


class TooLargeError(ControlError):
    """A body is larger than `MAX_BODY_BYTES`."""

    def __init__(self) -> None:
        super().__init__(f"The body is larger than {MAX_BODY_BYTES >> 10} KiB.")


_STATUSES = {TooLargeError: 413, _BadRequestError: 400, NotFoundError: 404}
"""The HTTP status of each refusal; a command that is not possible now has 409."""


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
        except FlexInspectError as error:
            return _error_response(_STATUSES.get(type(error), 409), error.message, error.hint)

    return endpoint


def _parse_body(kind: type[Any], data: bytes) -> Any:
    try:
        return from_json(kind, msgspec.json.decode(data))
    except ControlError as error:
        raise _BadRequestError(error.message, hint=error.hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadRequestError(f"The body is not JSON: {error}") from error


def _error_response(
    status: int, error: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(to_json(ErrorResponse(error, hint)), status, headers=headers)


async def _on_server_error(request: Request, error: Exception) -> Response:
    return _error_response(500, f"The control server failed: {type(error).__name__}: {error}")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"There is no route {request.method} {request.url.path}."
    hint = "GET /openapi.json lists all routes."
    return _error_response(error.status_code, message, hint, error.headers)


MAX_BODY_BYTES = 64 << 10
"""Largest body of a request, in bytes."""

MAX_PATH_LENGTH = 256
"""Longest path of a request, in characters."""


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
            message = f"The path is longer than {MAX_PATH_LENGTH} characters."
            await _refusal(414, message)(scope, receive, send)
        elif size is not None and (not size.isdecimal() or int(size) > MAX_BODY_BYTES):
            await _refusal(413, TooLargeError().message)(scope, receive, send)
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
            refusal = _refusal(403, "The Host header does not name this server.", _HOST_HINT)
            await refusal(scope, receive, send)
        elif not self._has_token(_header(scope, b"authorization") or ""):
            refusal = _refusal(401, "The token is missing or wrong.", _TOKEN_HINT)
            await refusal(scope, receive, send)
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


def _refusal(status: int, error: str, hint: str | None = None) -> JSONResponse:
    """Return the response to a request that the application does not see."""
    return _error_response(status, error, hint, {"Connection": "close"})


ERROR_STATUSES: Mapping[int, str] = {
    400: "The request is not valid.",
    401: "The token is missing or wrong (only over TCP).",
    403: "The Host header does not name this server (only over TCP).",
    404: "There is no such route, breakpoint or level.",
    405: "The route does not support this method.",
    409: "The command is not possible in the current state.",
    413: "The body is too large.",
}


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
    refused = {
        str(code): {"$ref": f"#/components/responses/Refused{code}"} for code in ERROR_STATUSES
    }
    answer = {"description": "The response.", **_content(route.response)}
    operation: dict[str, Any] = {
        "operationId": route.handler.rstrip("_"),
        "summary": route.summary,
        "responses": {"200": answer, **refused},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body)}
    if route.parameter is not None:
        name, schema = route.parameter
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": dict(schema)}
        ]
    return operation


def _content(kind: type[Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}
