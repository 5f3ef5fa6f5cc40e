"""Records what a mask_mod computes with: its source text, and the values of its variables.

The interface evaluates the source for one cell from these values; it never runs code of a trace.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from flexinspect.masks.mask_mod_evaluation import SourceText
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.python_internals.mask_mod_identity import (
    UNSET,
    closure_contents,
    mask_mod_source,
)
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.step_writer.mask_records import TENSOR_PREFIX

MAX_ELEMENTS = 1 << 20
"""Tensors with more elements than this are recorded by their shape only."""
_MAX_ITEMS, _MAX_DEPTH, _MAX_TEXT = 64, 5, 200
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)

Variables = Mapping[str, Any]


class MaskModCodes:
    """Captures the variables of mask_mods, each source text and tensor once."""

    def __init__(self) -> None:
        self._sources: set[str] = set()
        self._versions: dict[int, tuple[ref[Tensor], int | None]] = {}

    def capture(
        self, mask_mod: Any, buffer: StepBuffer
    ) -> tuple[dict[str, Any] | None, list[SourceText]]:
        """Return the function with its variables, and the source texts that are not recorded yet.

        A tensor is referred to by its `id`, and is put into the buffer if it is new or was changed.
        A mask_mod that is not a Python function gives None.
        """
        is_shifted = hasattr(mask_mod, "flexinspect_rule")
        mask_mod = getattr(mask_mod, "flexinspect_rule", mask_mod)
        if getattr(mask_mod, "__code__", None) is None:
            mask_mod = getattr(mask_mod, "__call__", None)  # noqa: B004  # the bound method
        if getattr(mask_mod, "__code__", None) is None:
            return None, []
        new: list[SourceText] = []
        found = self._describe_function(mask_mod, 0, buffer, new)
        return found | {"indices": "positions" if is_shifted else "rows"}, new

    def _describe(self, value: Any, code: CodeType, depth: int, *where: Any) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"other": str(value)}
        if isinstance(value, str):
            return value[:_MAX_TEXT]
        if isinstance(value, Tensor):
            return self._describe_tensor(value, *where)
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, BuiltinFunctionType) or type(value) is type:
            return {"builtin": value.__name__}
        if depth < _MAX_DEPTH:
            if getattr(value, "__code__", None) is not None:
                return self._describe_function(value, depth + 1, *where)
            if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
                return [self._describe(item, code, depth + 1, *where) for item in value]
            fields = {
                name: self._describe(each, code, depth + 1, *where)
                for name, each in _fields(value, _names(code))
            }
            if fields:
                return {"class": type(value).__name__, "fields": fields}
        return {"other": type(value).__name__}

    def _describe_function(
        self, function: Any, depth: int, buffer: StepBuffer, new: list[SourceText]
    ) -> dict[str, Any]:
        source = mask_mod_source(function) or ""
        if source not in self._sources:
            self._sources.add(source)
            text, line = _source_text(function)
            if text:
                new.append(SourceText(source, function.__qualname__, line, text))
        code = function.__code__
        variables = {
            name: self._describe(value, code, depth, buffer, new)
            for name, value in _variables(function)
        }
        return {"source": source, "variables": variables}

    def _describe_tensor(
        self, tensor: Tensor, buffer: StepBuffer, _: list[SourceText]
    ) -> dict[str, Any]:
        if tensor.numel() > MAX_ELEMENTS or tensor.dtype not in _DTYPES:
            return {"shape": list(tensor.shape)}
        key, version = id(tensor), tensor_version(tensor)
        known = self._versions.get(key)
        if known is None or version is None or known[0]() is not tensor or known[1] != version:
            self._versions[key] = ref(tensor), version
            # A copy, because the user may write to the tensor before it is on disk.
            buffer.put(f"{TENSOR_PREFIX}{key}", tensor.detach().clone())
        return {"tensor": key}


def _source_text(function: Any) -> tuple[str, int]:
    """Return the text of a function without indentation, and its first line; "" if unknown."""
    # The file may have been edited since it was imported.
    with suppress(OSError, TypeError, ValueError, IndexError, SyntaxError, tokenize.TokenError):
        lines, line = inspect.getsourcelines(function)
        if function.__name__ == "<lambda>":
            return _lambda_text("".join(lines), line, function.__code__)
        return textwrap.dedent("".join(lines)).rstrip(), line
    return "", 0


def _lambda_text(text: str, line: int, code: CodeType) -> tuple[str, int]:
    """Return the lambda with this code, of a text with the statement around it, and its line."""
    places = ((at or 0, low or 0) for at, _, low, _ in code.co_positions())
    body_line, column = min(place for place in places if place > (code.co_firstlineno, 0))
    lines = text.splitlines(keepends=True)
    before = lines[body_line - line].encode()[:column].decode()
    body = len("".join(lines[: body_line - line])) + len(before)
    start = text.rindex("lambda", 0, body)
    for stop in range(len(text), body, -1):
        with suppress(SyntaxError):
            ast.parse(f"({text[start:stop]})", mode="eval")
            return text[start:stop].rstrip(), line + text.count("\n", 0, start)
    return "", 0


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function reads and does not assign: captured, default, global."""
    function_itself = getattr(function, "__func__", function)
    code = function_itself.__code__
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield code.co_varnames[0], owner
    defaults = function_itself.__defaults__ or ()
    stop = code.co_argcount
    yield from zip(code.co_varnames[stop - len(defaults) : stop], defaults, strict=True)
    yield from (function_itself.__kwdefaults__ or {}).items()
    for name, value in zip(code.co_freevars, closure_contents(function_itself), strict=True):
        if value is not UNSET:
            yield name, value
    namespace = function_itself.__globals__
    for name in _names(code):
        value = namespace.get(name, UNSET)
        if value is not UNSET:
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and the attributes that a code object uses."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _fields(value: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object that have these names, without running its code."""
    for name in names:
        found = inspect.getattr_static(value, name, UNSET)
        if isinstance(found, MemberDescriptorType):
            found = getattr(value, name, UNSET)
        if found is UNSET and isinstance(value, torch.nn.Module):
            found = value._buffers.get(name, value._parameters.get(name, UNSET))
        if found is not UNSET and not isinstance(found, property | ModuleType):
            yield name, found
