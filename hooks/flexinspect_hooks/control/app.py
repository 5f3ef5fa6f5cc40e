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
from flexinspect.control.messages import Refusal
from flexinspect.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.guard import TooLargeError
from flexinspect_hooks.control.openapi import document
from flexinspect_hooks.control.verbs import ROUTES, AbsentError, Route, Verbs

Endpoint = Callable[[Request], Awaitable[Response]]


class _UnreadableError(ControlError):
    """A body that is not what the route takes."""


def make_app(verbs: Verbs) -> Starlette:
    """Return the application, without anything that guards it."""
    routes = [
        StarletteRoute(_typed(route), _endpoint(route, verbs), methods=[route.method])
        for route in ROUTES
    ]
    routes.append(StarletteRoute("/openapi.json", _document, methods=["GET"]))
    handlers: Any = {HTTPException: _not_found, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=handlers)


def _typed(route: Route) -> str:
    """Return a path in Starlette's words; numbers only match where a number is meant."""
    return route.path.replace("{number}", "{number:int}")


async def _document(request: Request) -> Response:
    return JSONResponse(document())


def _endpoint(route: Route, verbs: Verbs) -> Endpoint:
    verb = route.call(verbs)

    async def endpoint(request: Request) -> Response:
        try:
            given = list(request.path_params.values())
            if route.body is not None:
                given.append(_body(route.body, await request.body()))
            return JSONResponse(to_json(verb(*given)))
        except TooLargeError as error:
            return _refusal(413, error)
        except _UnreadableError as error:
            return _refusal(400, error)
        except AbsentError as error:
            return _refusal(404, error)
        except FlexInspectError as error:
            return _refusal(409, error)

    return endpoint


def _body(kind: type[Any], data: bytes) -> Any:
    try:
        text = data.decode()
        text.encode()
        return from_json(kind, json.loads(text))
    except ControlError as error:
        raise _UnreadableError(error.message, hint=error.hint) from error
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"The body is not JSON: {error}") from error


def _refusal(status: int, error: FlexInspectError) -> Response:
    return JSONResponse(to_json(Refusal(error.message, error.hint)), status)


async def _failed(request: Request, error: Exception) -> Response:
    what = f"{type(error).__name__}: {error}"
    return JSONResponse(to_json(Refusal(f"The server itself failed: {what}")), 500)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = Refusal(f"{where} is nothing that a capture does.", "GET /openapi.json lists what is.")
    return JSONResponse(to_json(said), error.status_code, headers=error.headers)
