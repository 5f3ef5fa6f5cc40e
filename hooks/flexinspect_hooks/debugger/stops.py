"""Announces every stop of a debugger in this process to viewers, in a file next to the trace."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flexinspect.trace.file.side_files import DebuggerStop, remove_stop, write_stop

_traces: list[Path] = []
"""The trace that this process records; at most one."""

_announcer_lock = threading.Lock()
"""Held by the thread that stopped first; stops of other threads are not announced."""

_reasons: dict[int, str] = {}
"""The reason of a stop by thread id, if a model event caused it."""


def announce_stops(trace: Path) -> None:
    """Announce stops of a debugger next to this trace from now on."""
    if not _traces:
        os.register_at_fork(after_in_child=_traces.clear)
    _traces[:] = [trace]


def end_announcements() -> None:
    """Stop announcing; the trace is about to be closed."""
    while _traces:
        remove_stop(_traces.pop())


@contextmanager
def announced_stop(by: str, frame: FrameType) -> Iterator[None]:
    """Context manager of a stop of this thread in `frame`, by the debugger `by`."""
    if not _announcer_lock.acquire(blocking=False):
        yield
        return
    code = frame.f_code
    reason = _reasons.get(threading.get_ident(), "")
    try:
        for trace in _traces:
            location = (code.co_filename, frame.f_lineno, code.co_name)
            write_stop(trace, DebuggerStop(os.getpid(), by, *location, time.time(), reason))
        yield
    finally:
        for trace in _traces:
            remove_stop(trace)
        _announcer_lock.release()


@contextmanager
def stop_reason(reason: str) -> Iterator[None]:
    """Context manager in which a stop of this thread has this reason."""
    me = threading.get_ident()
    _reasons[me] = reason
    try:
        yield
    finally:
        _reasons.pop(me, None)


def announce_pydevd_stops() -> None:
    """Wrap pydevd's wait to announce its stops, for which it has no event. pydevd is loaded."""
    from pydevd import PyDB

    wait = PyDB.do_wait_suspend
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def do_wait_suspend(debugger: Any, thread: Any, frame: FrameType, *args: Any, **kw: Any) -> Any:
        with announced_stop("debugpy", frame):
            return wait(debugger, thread, frame, *args, **kw)

    PyDB.do_wait_suspend = do_wait_suspend
