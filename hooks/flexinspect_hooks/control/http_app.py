"""The HTTP side of the control server: connections, guards, routes and the OpenAPI document.

Every error response is an `ErrorResponse` in JSON. Only the server thread imports this module, so
that its libraries neither delay nor end the run.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import h11
import msgspec

from flexinspect.control.messages import ErrorResponse, from_json, to_json
from flexinspect.core import __version__
from flexinspect.core.addresses import is_loopback
from flexinspect.core.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.handlers import PARAMETERS, ROUTES, HttpError, Route, RouteHandlers

IDLE_S = 30
"""How long a connection may be idle, or its request incomplete."""

MOST_CONNECTIONS = 64
"""Connections per socket at a time; more could exhaust the program's file descriptors."""

LINGER_S = 0.5
"""How long the rest of a refused request is read, so that its client can read the response."""

MAX_BODY_BYTES = 64 << 10
"""Largest body of a request, in bytes."""

MAX_PATH_LENGTH = 256
"""Longest path of a request, in characters."""

_HOST_HINT = "Use the address that the server listens on."
_TOKEN_HINT = (
    "Send the header 'Authorization: Bearer TOKEN' (flexinspect ctl reads the token from "
    "FLEXINSPECT_TOKEN); --serve prints the token."
)
_ROUTE_HINT = "GET /openapi.json lists all routes."


class ControlApp:
    """Answers requests to one socket. With a `token` it requires the token and a Host of `hosts`.

    A page in the user's browser can send requests here under its own host name if that name
    resolves to this machine (DNS rebinding); then the Host header is not one of `hosts`.
    """

    def __init__(
        self, handlers: RouteHandlers, token: str = "", hosts: Collection[str] = ()
    ) -> None:
        self._handlers, self._token = handlers, token.encode()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._n_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        self._n_connections += 1
        connection = _Connection(reader, writer)
        is_open = self._n_connections <= MOST_CONNECTIONS
        with suppress(OSError, h11.ProtocolError):  # the client has gone, or has been idle
            while is_open:
                async with asyncio.timeout(IDLE_S):
                    is_open = await self._serve_request(connection)
        self._n_connections -= 1
        writer.close()

    async def _serve_request(self, connection: _Connection) -> bool:
        """Answer the next request; return whether the connection can take another one."""
        headers = {"content-type": "application/json"}
        request = None
        try:
            request = await connection.next_event()
            if not isinstance(request, h11.Request):
                return False
            status, answer = 200, await self._answer(connection, request)
        except HttpError as error:
            status, answer = error.status, ErrorResponse(error.message, error.hint)
            headers |= error.headers
        except FlexInspectError as error:  # the command is not possible now
            status, answer = 409, ErrorResponse(error.message, error.hint)
        except h11.RemoteProtocolError as error:
            status, answer = error.error_status_hint, ErrorResponse(f"This is not HTTP: {error}.")
        except (ConnectionError, TimeoutError):
            raise  # by the connection
        except Exception as error:
            text = f"The control server failed: {type(error).__name__}: {error}"
            status, answer = 500, ErrorResponse(text)
        is_head = request is not None and request.method == b"HEAD"
        body = b"" if is_head else json.dumps(to_json(answer)).encode()
        return await connection.respond(status, headers, body)

    async def _answer(self, connection: _Connection, request: h11.Request) -> Any:
        if self._token:
            self._check_access(request)
        path = unquote(request.target.partition(b"?")[0].decode("latin-1"))
        if len(path) > MAX_PATH_LENGTH:  # `int` would parse a number of any length
            raise HttpError(414, f"The path is longer than {MAX_PATH_LENGTH} characters.")
        body = await connection.read_body()
        route, args = _find_route(request.method.decode(), path)
        if route is None:
            return openapi_document()
        if route.body is not None:
            args.append(_parse_body(route.body, body))
        return getattr(self._handlers, route.handler)(*args)

    def _check_access(self, request: h11.Request) -> None:
        host = _header(request, b"host")
        before, _, port = host.rpartition(":")
        name = before if port.isdigit() else host
        if name.strip("[]").lower() not in self._hosts:
            raise HttpError(403, "The Host header does not name this server.", hint=_HOST_HINT)
        scheme, _, token = _header(request, b"authorization").partition(" ")
        received = token.strip().encode("latin-1", "replace")
        if not hmac.compare_digest(received, self._token) or scheme.lower() != "bearer":
            raise HttpError(401, "The token is missing or wrong.", hint=_TOKEN_HINT)


class _Connection:
    """The HTTP/1.1 connection of one client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER)

    async def next_event(self) -> Any:
        """Wait for a request, a part of its body, or the end of one of the two."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(MAX_BODY_BYTES))
        return event

    async def read_body(self) -> bytes:
        """Return the body of the request. Raises `HttpError` if it is too large."""
        body = b""
        while isinstance(event := await self.next_event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise HttpError(413, f"The body is larger than {MAX_BODY_BYTES >> 10} KiB.")
        return body

    async def respond(self, status: int, headers: dict[str, str], body: bytes) -> bool:
        """Send a response; return whether the connection can take another request."""
        is_complete = self._http.their_state is h11.DONE
        headers["content-length"] = str(len(body))
        headers |= {} if is_complete else {"connection": "close"}
        self._write(h11.Response(status_code=status, headers=[*headers.items()]))
        self._write(h11.Data(body))
        self._write(h11.EndOfMessage())
        await self._writer.drain()
        if self._http.our_state is h11.DONE and is_complete:
            self._http.start_next_cycle()
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                self._writer.write_eof()
                while await self._reader.read(MAX_BODY_BYTES):
                    pass
        return False

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")


def allowed_hosts(host: str) -> frozenset[str]:
    """Return the names that the Host header may have for a server that listens on `host`."""
    names = {host, "localhost", "127.0.0.1"}
    if is_loopback(host):
        return frozenset({*names, "::1"})
    with suppress(OSError):
        names |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return frozenset({*names, socket.gethostname()})


def _header(request: h11.Request, name: bytes) -> str:
    """Return a header of a request, empty if it is missing or repeated."""
    values = [value for key, value in request.headers if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _find_route(method: str, path: str) -> tuple[Route | None, list[Any]]:
    """Return a route and its path parameters, None for the document. Raises `HttpError`."""
    method = "GET" if method == "HEAD" else method
    if (method, path) == ("GET", "/openapi.json"):
        return None, []
    found = {
        route.method: (route, parameters)
        for route in ROUTES
        if (parameters := route.match(path)) is not None
    }
    if method in found:
        return found[method]
    allowed = {"allow": ", ".join(found)} if found else {}
    message = f"There is no route {method} {path}."
    raise HttpError(405 if found else 404, message, hint=_ROUTE_HINT, **allowed)


def _parse_body(kind: type[Any], data: bytes) -> Any:
    try:
        return from_json(kind, msgspec.json.decode(data))
    except ControlError as error:
        raise HttpError(400, error.message, hint=error.hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is not JSON: {error}") from error


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


def _content(kind: type[Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}
