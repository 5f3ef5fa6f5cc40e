"""Stops in a debugger for model events, and pdb on the user's terminal.

The process that owns the terminal is asked for it before the first prompt, waits while pdb uses it,
and gets it back when the run continues. The terminal is opened by name: the capture process has its
own session, and its standard streams are pipes.
"""

from __future__ import annotations

import pdb
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from msgspec import Struct, field

from flexinspect.core.signals import allow_interrupts
from flexinspect_hooks.debugger.debugpy_server import active_pydevd, is_attached
from flexinspect_hooks.debugger.frames import frame_to_stop_in, is_user_frame
from flexinspect_hooks.debugger.stops import announced_stop, stop_reason

VARIABLE_NAME = "flexinspect"
"""The variable in the stopped frame that holds the reason of the stop."""

_FALLBACK_VARIABLE_NAME = "flexinspect_stop"


class StopReason(Struct, frozen=True):
    """Why a frame was stopped; `facts` holds further data (finding, module, entropy, ...)."""

    reason: str
    step: int | None = None
    layer: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def can_stop() -> bool:
    """Return whether `stop_in` would stop: a client is attached, or pdb has a terminal."""
    return is_attached() or _terminal is not None


def stop_in(frame: FrameType, reason: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Stop in the debugger now, in the user's frame above `frame`; return when it continues.

    While the frame is stopped, its variable `flexinspect` holds `reason` and `facts`, which may
    contain `step` and `layer`. Returns False at once without a debugger.
    """
    if not can_stop():
        return False
    others = dict(facts or {})
    step, layer = others.pop("step", None), others.pop("layer", None)
    stop = StopReason(reason, step, layer, others)
    stop_frame = frame_to_stop_in(frame)
    with _stop_variable(stop_frame, stop), stop_reason(reason):
        if is_attached():
            _stop_pydevd(stop_frame)
        elif _terminal is not None:
            _terminal.pdb().stop(stop_frame, reason)
    return True


def _stop_pydevd(frame: FrameType) -> None:
    """Suspend this thread in a frame above the running one.

    `pydevd.settrace(stop_at_frame=...)` would stop at the next line of the frame: too late for a
    call that raises, and never in a mask_mod of one line. So this waits as pydevd's own breakpoints
    do.
    """
    from _pydevd_bundle.pydevd_additional_thread_info import set_additional_thread_info
    from _pydevd_bundle.pydevd_comm_constants import CMD_SET_BREAK

    debugger, thread = active_pydevd(), threading.current_thread()
    set_additional_thread_info(thread).pydev_original_step_cmd = CMD_SET_BREAK
    debugger.set_suspend(thread, CMD_SET_BREAK)
    debugger.disable_tracing()  # expressions that the client evaluates must not stop
    try:
        debugger.do_wait_suspend(thread, frame, "line", None)
    finally:
        debugger.enable_tracing()


@contextmanager
def _stop_variable(frame: FrameType, stop: StopReason) -> Iterator[None]:
    """Add the stop as a variable to the frame, and remove it afterwards."""
    taken = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    # The variables of a module are its globals, which a stop must not replace.
    is_module = frame.f_locals is frame.f_globals
    is_taken = VARIABLE_NAME in taken or (is_module and VARIABLE_NAME in frame.f_globals)
    name = _FALLBACK_VARIABLE_NAME if is_taken else VARIABLE_NAME
    frame.f_locals[name] = stop
    try:
        yield
    finally:
        with suppress(ValueError, TypeError):  # from Python 3.13 on it cannot be removed
            frame.f_locals.pop(name, None)


GRANT_TIMEOUT_S = 10.0
"""How long to wait for the process that owns the terminal."""


def use_terminal(name: str, request: Callable[[bool], None]) -> Terminal:
    """Use the terminal `name` for pdb, at `breakpoint()`, exceptions and model events.

    `request(True)` asks for the terminal, and `Terminal.granted` is set when it is available;
    `request(False)` gives it back.
    """
    global _terminal
    _terminal = Terminal(name, request)
    pdb = _terminal.pdb
    sys.breakpointhook = lambda *args, **kwargs: pdb().stop(sys._getframe(1), "breakpoint()")
    return _terminal


def prompt_in(debugger: pdb.Pdb, frame: FrameType) -> None:
    """Prompt now in `frame`, above the running one, and trace from there if the user steps.

    `Pdb.set_trace` would stop at the next line that runs, which is in flexinspect. Raises
    `KeyboardInterrupt` when the user quits.
    """
    debugger.reset()
    for above, _ in traceback.walk_stack(frame):
        above.f_trace = debugger.trace_dispatch
        debugger.botframe = above
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise KeyboardInterrupt
    if debugger.stopframe is not debugger.botframe or debugger.breaks:
        sys.settrace(debugger.trace_dispatch)


class Terminal:
    """The user's terminal, borrowed from the process that owns it."""

    def __init__(self, name: str, request: Callable[[bool], None]) -> None:
        self._name, self._request = name, request
        self._is_acquired = False
        self.granted = threading.Event()
        """Set when the terminal is available."""
        self._pdb: TerminalPdb | None = None

    def pdb(self) -> TerminalPdb:
        """Return the debugger; one for all stops, as it holds the breakpoints."""
        if self._pdb is None:
            # Two streams, as a stream for both reading and writing would have to be seekable.
            path = Path(self._name)
            reads = path.open(encoding="utf-8")
            self._pdb = TerminalPdb(self, reads, path.open("w", encoding="utf-8"))
        return self._pdb

    def acquire(self) -> None:
        """Borrow the terminal until `release`."""
        if not self._is_acquired:
            self._is_acquired = True
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()  # earlier output must appear before the prompt
            self.granted.clear()
            self._request(True)
            self.granted.wait(GRANT_TIMEOUT_S)

    def release(self) -> None:
        """Give the terminal back."""
        if self._is_acquired:
            self._is_acquired = False
            self._request(False)


_terminal: Terminal | None = None
"""The terminal of this process, if pdb was requested."""


class TerminalPdb(pdb.Pdb):
    """pdb that borrows its terminal, and whose `quit` ends the run as Ctrl-C does."""

    def __init__(self, terminal: Terminal, reads: Any, writes: Any) -> None:
        super().__init__(stdin=reads, stdout=writes, nosigint=True, readrc=False)
        self.prompt = "(flexinspect pdb) "
        self._terminal = terminal

    def stop(self, frame: FrameType, reason: str) -> None:
        """Prompt now in `frame`; return when the run continues."""
        self._terminal.acquire()
        with stop_reason(reason):
            self.message(f"> stopped: {reason}")
            prompt_in(self, frame)

    def post_mortem(self, error: BaseException) -> None:
        """Prompt where an exception was first raised, in the user's innermost frame."""
        while error.__cause__ is not None:
            error = error.__cause__
        if error.__traceback__ is None:
            return
        self.reset()
        reason = traceback.format_exception_only(error)[-1].strip()
        self._terminal.acquire()
        self.message(f"> {reason}")
        with stop_reason(reason):
            self.interaction(None, _trim_to_user_frame(error.__traceback__))
        self._terminal.release()

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Prompt; pdb keeps the terminal while stepping, and releases it when the run continues."""
        self._terminal.acquire()
        links = [*_links(traceback)] if isinstance(traceback, TracebackType) else []
        stop_frame = frame or (links[-1].tb_frame if links else sys._getframe())
        with announced_stop("pdb", stop_frame), allow_interrupts():
            super().interaction(frame, traceback)
        if self.quitting or self.stopframe is self.botframe:
            self._terminal.release()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace; `quit` raises `KeyboardInterrupt`."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except BdbQuit:
            raise KeyboardInterrupt from None


def _trim_to_user_frame(trace: TracebackType) -> TracebackType:
    """Return the traceback up to the user's innermost frame, or all of it without one."""
    links = [*_links(trace)]
    while links and not is_user_frame(links[-1].tb_frame):
        links.pop()
    trimmed: TracebackType | None = None
    for link in reversed(links):
        trimmed = TracebackType(trimmed, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return trimmed or trace


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
