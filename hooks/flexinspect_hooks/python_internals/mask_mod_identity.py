"""Identifies a mask_mod: its name, its source line, a digest of its code and captured values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor

from flexinspect_hooks.python_internals.torch_private import tensor_version

_MAX_HASHED = 1 << 20
"""Captured tensors of more bytes than this are identified by shape, dtype and address only."""


def mask_mod_name(mask_mod: Any) -> str:
    """Return the module and qualified name of a mask_mod, or of its type if it is not a function.

    A mask_mod that only shifts the indices of another (`flexinspect_rule`) has the name of that
    one. Presets set `flexinspect_name`, because each has several implementations.
    """
    own = getattr(mask_mod, "flexinspect_name", None)
    if own is not None:
        return str(own)
    mask_mod = getattr(mask_mod, "flexinspect_rule", mask_mod)
    if isinstance(mask_mod, FunctionType):
        # A function that `exec` defines in a bare dictionary has no module.
        module = f"{mask_mod.__module__}." if mask_mod.__module__ else ""
        return f"{module}{mask_mod.__qualname__}"
    return f"{type(mask_mod).__module__}.{type(mask_mod).__qualname__}"


def mask_mod_source(mask_mod: Any) -> str | None:
    """Return the mask_mod's "file:line", or None if it is not a Python function."""
    code = getattr(getattr(mask_mod, "flexinspect_rule", mask_mod), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def mask_mod_identity(mask_mod: Any) -> str:
    """Return a digest that distinguishes mask_mods of the same name: code and captured values.

    Presets set `flexinspect_identity`; for others the byte code, constants and closure are read.
    Tensors on an accelerator are identified by address and version, which needs no synchronisation.
    """
    own = getattr(mask_mod, "flexinspect_identity", None)
    return _digest(mask_mod, depth=0) if own is None else str(own)


def _digest(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        label = f"{tuple(value.shape)}{value.dtype}"
        if value.device.type != "cpu" or value.nbytes > _MAX_HASHED:
            return f"{label}@{value.data_ptr():x}v{tensor_version(value)}"
        data = value.detach().contiguous().numpy().tobytes()
        return f"{label}{hashlib.blake2b(data, digest_size=8).hexdigest()}"
    code = getattr(value, "__code__", None)
    if code is None or depth > 3:
        return repr(value)[:200] if isinstance(value, int | float | str | bool | tuple) else "?"
    cells = [
        "unset" if content is UNSET else _digest(content, depth + 1)
        for content in closure_contents(value)
    ]
    body = hashlib.blake2b(code.co_code + repr(code.co_consts).encode(), digest_size=8)
    return f"{body.hexdigest()}({','.join(cells)})"


UNSET: Any = object()
"""Content of a cell whose variable is not assigned yet."""


def closure_contents(function: Any) -> Iterator[Any]:
    """Yield the values that a function captures."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield UNSET
