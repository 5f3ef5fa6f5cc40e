"""Keeps flexinspect's frames out of the tracebacks of a program's own exceptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

from flexinspect.core.errors import exception_chain

_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep


def strip_own_frames(error: BaseException) -> None:
    """Remove flexinspect's frames from the tracebacks of an exception and its causes."""
    for link in exception_chain(error):
        trace, kept = link.__traceback__, list[TracebackType]()
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
                kept.append(trace)
            trace = trace.tb_next
        for one, following in zip_longest(kept, kept[1:]):
            one.tb_next = following
        link.__traceback__ = kept[0] if kept else None


def hide_own_frames_at_exit(error: BaseException) -> None:
    """Let Python print the exception that ends the program without flexinspect's frames."""
    hook: Callable[..., Any] = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        if raised is error:
            strip_own_frames(raised)
            trace = raised.__traceback__
        hook(kind, raised, trace)

    sys.excepthook = show
