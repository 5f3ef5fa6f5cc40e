"""Copies of callables of the program that can be called without the program noticing.

A copy has its own attributes, or its own closure, down to tensors and containers. It shares code,
globals, tokenizers and other objects of libraries; `code_state.code_state_of` tells whether those
stay as they are.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, equal, nn

from flexinspect_hooks.generate_calls.code_state import UnknownStateError

_MAX_DEPTH, _MAX_ITEMS, _MAX_BYTES = 8, 1 << 14, 16 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, Enum)
_FIXED = (type, ModuleType, BuiltinFunctionType)
_NEW: Any = object.__new__
_LIBRARIES = ("torch", "transformers", "tokenizers", "re", "numpy", "math", "builtins", "functools")


def is_of_library(kind: type) -> bool:
    """Whether a class is of a known library, and no logits processor or stopping criterion."""
    module = kind.__module__
    is_base = "logits" in module or "stopping" in module
    return module.partition(".")[0] in _LIBRARIES and not is_base


def copy_of(called: Any) -> Any:
    """Return a copy of a callable; raises `UnknownStateError` if it holds what cannot be copied."""
    return _Copier().copy(called, 0)


def attributes_of(called: Any) -> dict[str, Any]:
    """Return the attributes of an instance by name, or what a function closes over."""
    if isinstance(called, MethodType):
        called = called.__self__
    if isinstance(called, FunctionType):
        cells = zip(called.__code__.co_freevars, called.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells}
    return dict(vars(called))


def set_attribute(called: Any, name: str, value: Any) -> None:
    """Set an attribute of an instance, or a variable that a function closes over."""
    if isinstance(called, MethodType):
        called = called.__self__
    if isinstance(called, FunctionType):
        cells = called.__closure__ or ()
        cells[called.__code__.co_freevars.index(name)].cell_contents = value
    else:
        vars(called)[name] = value


def remove_attribute(called: Any, name: str) -> None:
    """Remove an attribute of an instance."""
    owner = called.__self__ if isinstance(called, MethodType) else called
    vars(owner).pop(name, None)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ between two states."""
    missing = object()
    names = dict.fromkeys((*one, *other))
    return [n for n in names if not same(one.get(n, missing), other.get(n, missing))]


def same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal in all that `copy_of` copies."""
    if one is other:
        return True
    if type(one) is not type(other) or depth > _MAX_DEPTH:
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and equal(one, other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, b, depth + 1) for a, b in pairs)
    if isinstance(one, list | tuple | deque):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(a, b, depth + 1) for a, b in pairs)
    if isinstance(one, FunctionType):
        is_code = one.__code__ is other.__code__
        return is_code and same(attributes_of(one), attributes_of(other), depth + 1)
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__ and same(one.__self__, other.__self__, depth + 1)
    if isinstance(one, float):
        return bool(one == other) or (one != one and other != other)
    if isinstance(one, (*_PLAIN, set, frozenset)):
        return bool(one == other)
    if type(one).__module__ == "numpy":
        return one.shape == other.shape and bool((one == other).all())
    return hasattr(one, "__dict__") and same(vars(one), vars(other), depth + 1)


class _Copier:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self._n_items = self._n_bytes = 0

    def copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, (*_PLAIN, *_FIXED)):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        self._n_items += 1
        if depth > _MAX_DEPTH or self._n_items > _MAX_ITEMS or isinstance(value, nn.Module):
            raise UnknownStateError
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._count(value.numel() * value.element_size())
            return self._keep(value, value.detach().clone())
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.copy(value.__self__, depth + 1))
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            return self._container(value, depth)
        return self._object(value, depth)

    def _keep(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = made
        return made

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes > _MAX_BYTES:
            raise UnknownStateError

    def _function(self, value: FunctionType, depth: int) -> Any:
        is_library = (value.__module__ or "").partition(".")[0] in _LIBRARIES
        if is_library or not value.__closure__:
            return self._keep(value, value)
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        made.__kwdefaults__ = value.__kwdefaults__
        self._keep(value, made)
        for cell, old in zip(cells, value.__closure__, strict=True):
            if id(old) in self._made:  # a variable that two functions share
                raise UnknownStateError
            self._keep(old, cell)
            self._kept.append(old)
            cell.cell_contents = self.copy(old.cell_contents, depth + 1)
        return made

    def _container(self, value: Any, depth: int) -> Any:
        if len(value) > _MAX_ITEMS:
            raise UnknownStateError
        if isinstance(value, set | frozenset):
            if not all(isinstance(one, (*_PLAIN, tuple)) for one in value):
                raise UnknownStateError
            return self._keep(value, copy.copy(value))
        if isinstance(value, tuple):
            items = [self.copy(one, depth + 1) for one in value]
            is_plain = type(value) is tuple
            return self._keep(value, tuple(items) if is_plain else type(value)(*items))
        made = self._keep(value, copy.copy(value))
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            made[key] = self.copy(one, depth + 1)
        return made

    def _object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind.__name__ in ("Generator", "Random", "RandomState") or hasattr(kind, "__next__"):
            raise UnknownStateError
        if kind.__module__ == "numpy" and hasattr(value, "nbytes"):
            self._count(value.nbytes)
            return self._keep(value, value.copy())
        if is_of_library(kind):
            return self._keep(value, value)
        slots = any(vars(one).get("__slots__") for one in kind.__mro__)
        if slots or getattr(kind, "__new__", None) is not _NEW or not hasattr(value, "__dict__"):
            raise UnknownStateError
        made = self._keep(value, object.__new__(kind))
        for name, one in vars(value).items():
            vars(made)[name] = self.copy(one, depth + 1)
        return made
