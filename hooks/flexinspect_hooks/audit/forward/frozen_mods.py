"""Functions of the program as they are now, to be called later."""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, str, type(None))


def frozen(function: Any) -> Any:
    """Return a function that ignores what the program assigns to its variables from now on.

    Of a method the attributes are kept, and of a closure the plain values of its variables: a
    score_mod may read the number of cached keys there. Tensors are not copied. Any other callable
    is returned as it is.
    """
    if isinstance(function, partial):
        return partial(frozen(function.func), *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return _frozen_method(function)
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    cells = tuple(map(_frozen_cell, function.__closure__))
    code, values = function.__code__, function.__globals__
    result = FunctionType(code, values, function.__name__, function.__defaults__, cells)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _frozen_method(method: MethodType) -> Any:
    try:
        return MethodType(method.__func__, copy.copy(method.__self__))
    except Exception:  # an object of the program may not be copied
        return method


def _frozen_cell(cell: CellType) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    if isinstance(value, _PLAIN):
        return CellType(value)
    is_object = hasattr(value, "__dict__") and type(value).__module__ == "__main__"
    if not is_object or callable(value):
        return cell
    try:
        return CellType(copy.copy(value))
    except Exception:
        return cell
