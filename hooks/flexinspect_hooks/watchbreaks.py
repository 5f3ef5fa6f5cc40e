"""What a hit of a breakpoint does in the user's own process, under `flexinspect.watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Literal

from flexinspect.breaks.hits import BreakpointHit
from flexinspect.errors import UsageError
from flexinspect_hooks.debugging.frames import frame_to_stop_in

OnBreakOption = Callable[[BreakpointHit], None] | Literal["pdb"] | None
HitCallback = Callable[[BreakpointHit, FrameType], None]


def hit_callback(on_break: OnBreakOption) -> HitCallback:
    """Return what is called at a hit. Raises `UsageError` for what is neither of these."""
    if on_break is None:
        return _stop_in_pdb if _has_terminal() else _print_hit
    if on_break == "pdb":
        return _stop_in_pdb
    if not callable(on_break):
        raise UsageError('on_break is a function that takes a BreakpointHit, or "pdb".')
    return lambda hit, frame: on_break(hit)


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def print_notice(sentence: str) -> None:
    """Say something to the user."""
    print(f"flexinspect: {sentence}", file=sys.stderr)


def _print_hit(hit: BreakpointHit, frame: FrameType) -> None:
    print_notice(hit.sentence())


def _stop_in_pdb(hit: BreakpointHit, frame: FrameType) -> None:
    """Open Python's debugger in the user's own frame, at once; `quit` is like Ctrl-C.

    `Pdb.set_trace` would stop at whatever runs next, which is ours.
    """
    import pdb  # here: it takes `code` and others by names that a user's own file may have

    _print_hit(hit, frame)
    where, debugger = frame_to_stop_in(frame), pdb.Pdb()
    debugger.reset()
    above: FrameType | None = where
    while above is not None:
        above.f_trace = debugger.trace_dispatch
        debugger.botframe, above = above, above.f_back
    debugger.interaction(where, None)
    if debugger.quitting:
        raise KeyboardInterrupt
    if debugger.stopframe is not debugger.botframe or debugger.breaks:
        sys.settrace(debugger.trace_dispatch)
