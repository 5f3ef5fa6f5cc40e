"""What a program gives to the Python interface: taken as it is, or refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeVar

from torch import Tensor, nn

from flexinspect.errors import UsageError

T = TypeVar("T")


def module(given: T, whose: str) -> T:
    """Return a torch module. `whose` names the call that wants it, here and below.

    Raises `UsageError` for anything else, and so does each of these functions.
    """
    if not isinstance(given, nn.Module):
        raise UsageError(f"{whose} needs a torch module, not {kind_of(given)}.")
    return given


def tensor(given: Tensor, whose: str) -> Tensor:
    """Return a tensor."""
    if not isinstance(given, Tensor):
        raise UsageError(f"{whose} needs a torch tensor, not {kind_of(given)}.")
    return given


def optimizer(given: T, whose: str) -> T:
    """Return what has parameter groups: an optimizer, or a wrapper of one."""
    if not hasattr(given, "param_groups"):
        raise UsageError(f"{whose} needs a torch optimizer, not {kind_of(given)}.")
    return given


def count(given: int, name: str, least: int = 1) -> int:
    """Return a whole number that is `least` or more; `name` is the parameter's, here and below."""
    try:
        found = index(given)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, and is {given!r}.") from None
    if found < least:
        raise UsageError(f"{name} must be {least} or more, and is {found}.")
    return found


def limit(given: float, name: str) -> float:
    """Return a limit: a number of 0 or more."""
    found = number(given, name)
    if math.isnan(found) or found < 0:
        raise UsageError(f"{name} must be a number of 0 or more, and is {given!r}.")
    return found


def number(given: Any, name: str) -> float:
    """Return the one number of a tensor or of anything that is one."""
    if isinstance(given, Tensor) and given.numel() != 1:
        shape = tuple(given.shape)
        raise UsageError(f"{name} must be a single number, and has shape {shape}: reduce it.")
    try:
        return float(given.detach() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a single number, and is {given!r}.") from None


def function(given: object, name: str, of: str) -> Callable[..., Any]:
    """Return a function; `of` says of what."""
    if not callable(given):
        raise UsageError(f"{name} needs a function of {of}, not {kind_of(given)}.")
    return given


def batches(given: Any, whose: str) -> Any:
    """Return what batches can be taken from."""
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise UsageError(f"{whose} needs a loader of batches, not {kind_of(given)}.")
    return given


def kind_of(given: object) -> str:
    """Return what a thing is, in words."""
    if given is None:
        return "None"
    name = type(given).__name__
    return (
        f"the {name} {given!r}" if isinstance(given, (int, float)) else f"an object of type {name}"
    )
