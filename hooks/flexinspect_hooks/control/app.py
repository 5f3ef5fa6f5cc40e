"""The control server's application: routes, and errors that are always JSON with a sentence."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from flexinspect.control.codec import from_json, to_json
from flexinspect.control.messages import ErrorResponse
from flexinspect.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.guard import TooLargeError
from flexinspect_hooks.control.openapi import openapi_document
from flexinspect_hooks.control.verbs import ROUTES, NotFoundError, Route, RouteHandlers

Endpoint = Callable[[Request], Awaitable[Response]]


class _BadRequestError(ControlError):
    """A body that is not what the route takes."""


def make_app(route_handlers: RouteHandlers) -> Starlette:
    """Return the application, without anything that guards it."""
    routes = [
        StarletteRoute(
            _starlette_path(route), _endpoint(route, route_handlers), methods=[route.method]
        )
        for route in ROUTES
    ]
    routes.append(StarletteRoute("/openapi.json", _openapi, methods=["GET"]))
    handlers: Any = {HTTPException: _on_http_error, Exception: _on_server_error}
    return Starlette(routes=routes, exception_handlers=handlers)


def _starlette_path(route: Route) -> str:
    """Return a path in Starlette's words; numbers only match where a number is meant."""
    return route.path.replace("{number}", "{number:int}")


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi_document())


def _endpoint(route: Route, verbs: RouteHandlers) -> Endpoint:
    verb = route.bind(verbs)

    async def endpoint(request: Request) -> Response:
        try:
            given = list(request.path_params.values())
            if route.body is not None:
                given.append(_parse_body(route.body, await request.body()))
            return JSONResponse(to_json(verb(*given)))
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
        text = data.decode()
        text.encode()
        return from_json(kind, json.loads(text))
    except ControlError as error:
        raise _BadRequestError(error.message, hint=error.hint) from error
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"The body is not JSON: {error}") from error


def _error_response(status: int, error: FlexInspectError) -> Response:
    return JSONResponse(to_json(ErrorResponse(error.message, error.hint)), status)


async def _on_server_error(request: Request, error: Exception) -> Response:
    what = f"{type(error).__name__}: {error}"
    return JSONResponse(to_json(ErrorResponse(f"The server itself failed: {what}")), 500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = ErrorResponse(
        f"{where} is nothing that a capture does.", "GET /openapi.json lists what is."
    )
    return JSONResponse(to_json(said), error.status_code, headers=error.headers)
