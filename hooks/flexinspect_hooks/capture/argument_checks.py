"""What a program gives to the Python interface: taken as it is, or refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeVar

from torch import Tensor, nn

from flexinspect.core.errors import UsageError

T = TypeVar("T")


def check_module(value: T, caller: str) -> T:
    """Return a torch module. `whose` names the call that wants it, here and below.

    Raises `UsageError` for anything else, and so does each of these functions.
    """
    if not isinstance(value, nn.Module):
        raise UsageError(f"{caller} needs a torch module, not {describe_type(value)}.")
    return value


def check_tensor(value: Tensor, caller: str) -> Tensor:
    """Return a tensor."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{caller} needs a torch tensor, not {describe_type(value)}.")
    return value


def check_optimizer(value: T, caller: str) -> T:
    """Return what has parameter groups: an optimizer, or a wrapper of one."""
    if not hasattr(value, "param_groups"):
        raise UsageError(f"{caller} needs a torch optimizer, not {describe_type(value)}.")
    return value


def check_count(value: int, name: str, minimum: int = 1) -> int:
    """Return a whole number that is `least` or more; `name` is the parameter's, here and below."""
    try:
        found = index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, and is {value!r}.") from None
    if found < minimum:
        raise UsageError(f"{name} must be {minimum} or more, and is {found}.")
    return found


def check_limit(value: float, name: str) -> float:
    """Return a limit: a number of 0 or more."""
    found = check_number(value, name)
    if math.isnan(found) or found < 0:
        raise UsageError(f"{name} must be a number of 0 or more, and is {value!r}.")
    return found


def check_number(value: Any, name: str) -> float:
    """Return the one number of a tensor or of anything that is one."""
    if isinstance(value, Tensor) and value.numel() != 1:
        shape = tuple(value.shape)
        raise UsageError(f"{name} must be a single number, and has shape {shape}: reduce it.")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a single number, and is {value!r}.") from None


def check_function(value: object, name: str, argument: str) -> Callable[..., Any]:
    """Return a function; `of` says of what."""
    if not callable(value):
        raise UsageError(f"{name} needs a function of {argument}, not {describe_type(value)}.")
    return value


def check_batches(value: Any, caller: str) -> Any:
    """Return what batches can be taken from."""
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UsageError(f"{caller} needs a loader of batches, not {describe_type(value)}.")
    return value


def describe_type(value: object) -> str:
    """Return what a thing is, in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return (
        f"the {name} {value!r}" if isinstance(value, (int, float)) else f"an object of type {name}"
    )
