"""The OpenAPI document of the control server, generated from its routes and messages."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from flexinspect.control.messages import ErrorResponse, field_types, is_required, to_json
from flexinspect.core import __version__
from flexinspect_hooks.control.handlers import ROUTES, Route

_SCALAR_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
_LIMITS = ("minimum", "maximum")

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
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    refused = {
        f"Refused{n}": _content(ErrorResponse, description, schemas)
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


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.rstrip("_"),
        "summary": route.summary,
        "responses": {
            "200": _content(route.response, "The response.", schemas),
            **{
                str(code): {"$ref": f"#/components/responses/Refused{code}"}
                for code in ERROR_STATUSES
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body, None, schemas)}
    if route.parameter is not None:
        name, schema = route.parameter
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": dict(schema)}
        ]
    return operation


def _content(kind: type[Any], description: str | None, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {"content": {"application/json": {"schema": _ref(kind, schemas)}}}
    return content if description is None else {"description": description, **content}


def _ref(kind: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in schemas:
        schemas[name] = {}  # set first: a message may hold another message of its type
        schemas[name] = _schema(kind, schemas)
    return {"$ref": f"#/components/schemas/{name}"}


def _schema(kind: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    hints = field_types(kind)
    needed = [f.name for f in fields(kind) if is_required(f)]
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "properties": {f.name: _property(f, hints[f.name], schemas) for f in fields(kind)},
        "additionalProperties": False,
        **({"required": needed} if needed else {}),
    }


def _property(field: Field[Any], hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = _type_schema(hint, schemas, field.metadata)
    if field.default is not MISSING:
        schema = {**schema, "default": to_json(field.default)}
    return schema


def _type_schema(hint: Any, schemas: dict[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(arg for arg in args if arg is not type(None))
        return {"anyOf": [_type_schema(inner, schemas, limits), {"type": "null"}]}
    if origin is Literal:
        return {"type": "string", "enum": list(args)}
    if origin is tuple:
        longest = {"maxItems": limits["longest"]} if "longest" in limits else {}
        return {"type": "array", "items": _type_schema(args[0], schemas, {}), **longest}
    if is_dataclass(hint):
        return _ref(hint, schemas)  # type: ignore[arg-type]
    longest = {"maxLength": limits["longest"]} if "longest" in limits else {}
    return {**_SCALAR_SCHEMAS[hint], **longest, **{k: limits[k] for k in _LIMITS if k in limits}}
