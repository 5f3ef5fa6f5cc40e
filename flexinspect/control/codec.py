"""Messages as JSON and back, strictly: what does not fit is refused with a sentence.

A message is a frozen dataclass of whole numbers, numbers, texts, booleans, `Literal`s, other
messages, tuples of one of these, and None. `metadata` of a field may give its `minimum`,
`maximum` and `longest`; the schema of the server comes from the same place.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from flexinspect.errors import ControlError

T = TypeVar("T")

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def to_json(message: Any) -> Any:
    """Return a message as what `json.dumps` takes."""
    if is_dataclass(message):
        return {f.name: to_json(getattr(message, f.name)) for f in fields(message)}
    if isinstance(message, (tuple, list)):
        return [to_json(one) for one in message]
    return message


def from_json(kind: type[T], data: Any, where: str = "the body") -> T:
    """Return the message of this kind that `data` says. Raises `ControlError` naming what is wrong.

    What is not a field of the message is refused too: it would be obeyed by nobody.
    """
    if not isinstance(data, Mapping):
        raise ControlError(f"{where} must be a JSON object.")
    known = {f.name: f for f in fields(cast(Any, kind))}
    if unknown := sorted(set(data) - set(known)):
        listed = ", ".join(known) or "nothing"
        raise ControlError(f"{where} says {unknown[0]!r}, which is unknown (known: {listed}).")
    values = {
        name: _decode_field(kind, f, data, where)
        for name, f in known.items()
        if _is_present(f, data)
    }
    if missing := [name for name in known if name not in values and _is_required(known[name])]:
        raise ControlError(f"{where} lacks {missing[0]!r}.")
    return kind(**values)


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of a message's fields."""
    if kind not in _field_types:
        _field_types[kind] = get_type_hints(kind)
    return _field_types[kind]


_field_types: dict[type[Any], Mapping[str, Any]] = {}


def _is_present(field: Field[Any], data: Mapping[str, Any]) -> bool:
    return field.name in data


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _decode_field(kind: type[Any], field: Field[Any], data: Mapping[str, Any], where: str) -> Any:
    value = _decode_value(
        field_types(kind)[field.name], data[field.name], f"{field.name!r} in {where}"
    )
    _check_bounds(field, value, where)
    return value


def _decode_value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode_value(next(one for one in args if one is not type(None)), value, where)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ControlError(f"{where} must be one of {', '.join(args)}.")
    if origin is tuple:
        if not isinstance(value, list):
            raise ControlError(f"{where} must be a list.")
        return tuple(_decode_value(args[0], one, f"an entry of {where}") for one in value)
    if is_dataclass(hint):
        return from_json(cast(type[Any], hint), value, where)
    return _decode_scalar(hint, value, where)


def _decode_scalar(hint: type[Any], value: Any, where: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if hint is int and is_number and _is_integral(value):
        return int(value)
    if hint in (str, bool) and isinstance(value, hint) and _is_encodable(value):
        return value
    raise ControlError(f"{where} must be {_TYPE_NAMES[hint]}.")


def _is_encodable(value: str | bool) -> bool:
    """Say whether a text can be written: JSON may hold halves of characters."""
    return isinstance(value, bool) or value.encode("utf-8", "ignore").decode() == value


def _is_integral(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _check_bounds(field: Field[Any], value: Any, where: str) -> None:
    limits = field.metadata
    what = f"{field.name!r} in {where}"
    if value is None:
        return
    if "minimum" in limits and value < limits["minimum"]:
        raise ControlError(f"{what} must be at least {limits['minimum']}.")
    if "maximum" in limits and value > limits["maximum"]:
        raise ControlError(f"{what} must be at most {limits['maximum']}.")
    if "longest" in limits and len(value) > limits["longest"]:
        raise ControlError(f"{what} is longer than {limits['longest']}.")
