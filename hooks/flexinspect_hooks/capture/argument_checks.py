"""Checks of arguments of the Python interface.

Each function raises `UsageError` with a message that names the call (`caller`) or the parameter
(`name`); those of a number return the number, `check_batches` returns the batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Any

from torch import Tensor, nn

from flexinspect.core.errors import UsageError


def check_module(value: object, caller: str) -> None:
    """Check that `value` is a `torch.nn.Module`."""
    _require(isinstance(value, nn.Module), value, caller, "a torch module")


def check_tensor(value: object, caller: str) -> None:
    """Check that `value` is a tensor."""
    _require(isinstance(value, Tensor), value, caller, "a torch tensor")


def check_optimizer(value: object, caller: str) -> None:
    """Check that `value` has `param_groups`: an optimizer, or a wrapper of one."""
    _require(hasattr(value, "param_groups"), value, caller, "a torch optimizer")


def _require(is_valid: bool, value: object, caller: str, expected: str) -> None:
    if not is_valid:
        raise UsageError(f"{caller} needs {expected}, not {describe_type(value)}.")


def check_count(value: int, name: str, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`."""
    try:
        count = index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, and is {value!r}.") from None
    if count < minimum:
        raise UsageError(f"{name} must be {minimum} or more, and is {count}.")
    return count


def check_limit(value: float, name: str) -> float:
    """Return `value` as a float of 0 or more."""
    limit = check_number(value, name)
    if math.isnan(limit) or limit < 0:
        raise UsageError(f"{name} must be a number of 0 or more, and is {value!r}.")
    return limit


def check_number(value: Any, name: str) -> float:
    """Return a number, or a tensor with one element, as a float."""
    if isinstance(value, Tensor) and value.numel() != 1:
        shape = tuple(value.shape)
        raise UsageError(f"{name} must be a single number, and has shape {shape}: reduce it.")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a single number, and is {value!r}.") from None


def check_function(value: object, name: str, argument: str) -> None:
    """Check that `value` is callable; the message names its expected `argument`."""
    _require(callable(value), value, name, f"a function of {argument}")


def check_batches(value: Any, caller: str) -> Any:
    """Check that `value` is iterable or can be indexed, as a `DataLoader`."""
    is_loader = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    _require(is_loader, value, caller, "a loader of batches")
    return value


def describe_type(value: object) -> str:
    """Describe a value for an error message: "None", "the int 3", "an object of type Linear"."""
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, (int, float)):
        return f"the {name} {value!r}"
    return f"an object of type {name}"
