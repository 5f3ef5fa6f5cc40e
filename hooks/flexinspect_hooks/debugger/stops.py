"""Telling viewers when a debugger holds this process: every stop, also those made by hand."""

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
"""The trace that this process records for whoever started it; at most one."""

_announcer_lock = threading.Lock()
"""Held by the thread that stopped first: others that are held with it say nothing."""

_reasons: dict[int, str] = {}
"""Why a thread is about to stop, by its id, where a model event is the reason."""


def announce_stops(trace: Path) -> None:
    """Say beside this trace from now on when a debugger holds the process."""
    if not _traces:
        os.register_at_fork(after_in_child=_traces.clear)
    _traces[:] = [trace]


def end_announcements() -> None:
    """Say nothing any more; the trace is closed."""
    while _traces:
        remove_stop(_traces.pop())


@contextmanager
def announced_stop(by: str, frame: FrameType) -> Iterator[None]:
    """While entered, this thread is held by the debugger of this name in this frame."""
    if not _announcer_lock.acquire(blocking=False):
        yield
        return
    code = frame.f_code
    reason = _reasons.get(threading.get_ident(), "")
    try:
        for trace in _traces:
            at = (code.co_filename, frame.f_lineno, code.co_name)
            write_stop(trace, DebuggerStop(os.getpid(), by, *at, time.time(), reason))
        yield
    finally:
        for trace in _traces:
            remove_stop(trace)
        _announcer_lock.release()


@contextmanager
def stop_reason(reason: str) -> Iterator[None]:
    """While entered, a stop of this thread has this reason."""
    me = threading.get_ident()
    _reasons[me] = reason
    try:
        yield
    finally:
        _reasons.pop(me, None)


def announce_pydevd_stops() -> None:
    """Let pydevd, which is loaded, tell of its waits. It offers no event that we could hear."""
    from pydevd import PyDB

    wait = PyDB.do_wait_suspend
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def do_wait_suspend(debugger: Any, thread: Any, frame: FrameType, *args: Any, **kw: Any) -> Any:
        with announced_stop("debugpy", frame):
            return wait(debugger, thread, frame, *args, **kw)

    PyDB.do_wait_suspend = do_wait_suspend
