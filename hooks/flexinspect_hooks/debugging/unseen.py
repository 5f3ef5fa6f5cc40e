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

from flexinspect_hooks.debugging.listening import active_pydevd, is_attached

_USES_MONITORING = sys.version_info >= (3, 12)
"""Whether pydevd watches a thread without tracing it."""

_active_lock = threading.Lock()
_active: list[Any] = [0, None]
"""How many threads are within, and the hook of `breakpoint()` that was there before the first."""


@contextmanager
def breakpoints_disabled() -> Iterator[None]:
    """While entered, neither breakpoints nor `breakpoint()` stop this thread."""
    found = active_pydevd() if is_attached() else None
    trace = sys.gettrace()
    _disable_breakpointhook()
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
        elif trace is not None or _USES_MONITORING:
            found.enable_tracing()
        _restore_breakpointhook()


def _disable_breakpointhook() -> None:
    with _active_lock:
        if not _active[0]:
            _active[1], sys.breakpointhook = sys.breakpointhook, _ignore_breakpoint
        _active[0] += 1


def _restore_breakpointhook() -> None:
    with _active_lock:
        _active[0] -= 1
        if not _active[0]:
            sys.breakpointhook = _active[1]


def _ignore_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Do nothing at a `breakpoint()`."""
