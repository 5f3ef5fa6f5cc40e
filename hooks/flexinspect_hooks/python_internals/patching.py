"""Replaces attributes of objects, classes and modules of other libraries, and restores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns a function that restores it, also if `owner` inherits it."""
    was_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if was_own:
            setattr(owner, name, before)
        elif name in vars(owner):  # else the program has removed it
            delattr(owner, name)

    return restore
