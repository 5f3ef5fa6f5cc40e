"""Code of the user's that we call ourselves, where no debugger should stop.

To know what a mask opened, capture evaluates its rule once more. A breakpoint in the rule is for
the call that the user made: a stop in ours would show a mask being applied that is only read, and
that of a compiled call, which no breakpoint can be hit in.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flexinspect_hooks.debugging.listening import debugger, is_attached

_MONITORS = sys.version_info >= (3, 12)
"""Whether pydevd watches a thread without tracing it."""

_lock = threading.Lock()
_inside: list[Any] = [0, None]
"""How many threads are within, and the hook of `breakpoint()` that was there before the first."""


@contextmanager
def unseen() -> Iterator[None]:
    """While entered, neither breakpoints nor `breakpoint()` stop this thread."""
    found = debugger() if is_attached() else None
    trace = sys.gettrace()
    _hush()
    if found is not None:  # pydevd has ways of its own
        found.disable_tracing()
    elif trace is not None:
        sys.settrace(None)
    try:
        yield
    finally:
        if found is None:
            if trace is not None:
                sys.settrace(trace)
        elif trace is not None or _MONITORS:
            found.enable_tracing()
        _speak()


def _hush() -> None:
    with _lock:
        if not _inside[0]:
            _inside[1], sys.breakpointhook = sys.breakpointhook, _pass_by
        _inside[0] += 1


def _speak() -> None:
    with _lock:
        _inside[0] -= 1
        if not _inside[0]:
            sys.breakpointhook = _inside[1]


def _pass_by(*args: Any, **kwargs: Any) -> None:
    """Do nothing at a `breakpoint()`."""
