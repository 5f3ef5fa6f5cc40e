"""Values on their way into and out of SQLite: JSON that survives NaN, and what cannot be bound."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_FLOAT = "$float"
_DEPTH = 40


def to_json(value: Any) -> str:
    """Return strict JSON of `value`; never raises, because a recording must go on.

    Non-finite floats become `{"$float": "NaN"}` (or "Infinity", "-Infinity"), tuples, sets and
    numpy arrays become lists, numpy scalars numbers, anything else its `str`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_default)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(simplify(value, _tagged_float), ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_utf8(text) else _to_ascii(text)


def from_json(text: str) -> Any:
    """Return what `to_json` was given, tuples as lists. Raises `ValueError` for damaged JSON."""
    try:
        return json.loads(text, object_hook=_untag)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def plain_json(value: Any) -> str:
    """Return ASCII JSON for other programs: non-finite floats are "NaN", "Infinity", "-Infinity".

    ASCII also keeps control characters of a token from reaching a terminal.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(simplify(value, float_name), allow_nan=False)


def float_name(value: float) -> str:
    """Return the name of a non-finite float, in the spelling that `float()` reads."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def simplify(value: Any, on_float: Callable[[float], Any], depth: int = 0) -> Any:
    """Return `value` as dicts, lists, strings and numbers, with `on_float` of non-finite floats."""
    if depth > _DEPTH:
        return repr(type(value))
    if _is_numpy(value):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else on_float(value)
    if isinstance(value, Mapping):
        return {str(key): simplify(item, on_float, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [simplify(item, on_float, depth + 1) for item in value]
    return value if isinstance(value, str | int | None) else str(value)


def _is_numpy(value: Any, *, scalar: bool = False) -> bool:
    """Tell without loading numpy: a value of it is there only when it is loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.generic) or (not scalar and isinstance(value, numpy.ndarray))


def bindable(params: Iterable[Any]) -> list[Any]:
    """Return parameters that SQLite takes, in place of some that it refused.

    numpy scalars become numbers, integers beyond 64 bits and anything unknown text, and lone
    surrogates, which UTF-8 cannot hold, backslash escapes.
    """
    return [_bindable(param) for param in params]


def _bindable(value: Any) -> Any:
    if _is_numpy(value, scalar=True):
        value = value.item()
    if value is None or isinstance(value, float | bytes | bytearray | memoryview):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    return str(value).encode("utf-8", "backslashreplace").decode()


def _json_default(value: Any) -> Any:
    if _is_numpy(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _tagged_float(value: float) -> dict[str, str]:
    return {_FLOAT: float_name(value)}


def _untag(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_ascii(text: str) -> str:
    return json.dumps(json.loads(text))
