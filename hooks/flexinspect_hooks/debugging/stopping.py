"""A stop of the debugger that a model event asks for, in the user's own frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from flexinspect_hooks.debugging import terminal
from flexinspect_hooks.debugging.frames import frame_to_stop_in
from flexinspect_hooks.debugging.holding import stop_reason
from flexinspect_hooks.debugging.listening import active_pydevd, is_attached

VARIABLE_NAME = "flexinspect"
"""The variable of the stopped frame that says why it stopped."""

_FALLBACK_VARIABLE_NAME = "flexinspect_stop"


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why a frame was stopped; `facts` are what else was said (finding, module, entropy, ...)."""

    reason: str
    step: int | None = None
    layer: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def can_stop() -> bool:
    """Say whether `stop_in` would stop: a client is attached, or pdb has a terminal."""
    return is_attached() or terminal.is_ready()


def stop_in(frame: FrameType, reason: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Let the debugger stop at once in the user's frame above `frame`; returns when it goes on.

    `facts` may name `step` and `layer`; together with `reason` they are the variable `flexinspect`
    of that frame while it is stopped. False, at once, when no debugger could stop.
    """
    if not can_stop():
        return False
    said = dict(facts or {})
    stop = StopReason(reason, said.pop("step", None), said.pop("layer", None), said)
    where = frame_to_stop_in(frame)
    with _stop_variable(where, stop), stop_reason(reason):
        if is_attached():
            _stop_pydevd(where)
        else:
            terminal.stop_in_pdb(where, reason)
    return True


def _stop_pydevd(frame: FrameType) -> None:
    """Suspend this thread in a frame that is above the running one.

    `pydevd.settrace(stop_at_frame=...)` would stop at the frame's next line: too late for a call
    that raises, and never in a rule of one line. So we wait as pydevd's own breakpoints do.
    """
    from _pydevd_bundle.pydevd_additional_thread_info import set_additional_thread_info
    from _pydevd_bundle.pydevd_comm_constants import CMD_SET_BREAK

    found, thread = active_pydevd(), threading.current_thread()
    info = set_additional_thread_info(thread)
    info.pydev_original_step_cmd = CMD_SET_BREAK
    found.set_suspend(thread, CMD_SET_BREAK)
    found.disable_tracing()  # what the client evaluates must not stop in its turn
    try:
        found.do_wait_suspend(thread, frame, "line", None)
    finally:
        found.enable_tracing()


@contextmanager
def _stop_variable(frame: FrameType, stop: StopReason) -> Iterator[None]:
    """Show the stop as a variable of the frame, and take it away afterwards."""
    taken = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    # A module's variables are the real ones, which a stop must not replace.
    is_module = frame.f_locals is frame.f_globals
    name = (
        _FALLBACK_VARIABLE_NAME
        if VARIABLE_NAME in taken or (is_module and VARIABLE_NAME in frame.f_globals)
        else VARIABLE_NAME
    )
    frame.f_locals[name] = stop
    try:
        yield
    finally:
        with suppress(ValueError, TypeError):  # from Python 3.13 on it has to stay
            frame.f_locals.pop(name, None)
