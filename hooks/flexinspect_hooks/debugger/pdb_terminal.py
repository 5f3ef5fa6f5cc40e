"""A stop of the debugger that a model event asks for, in the user's own frame.

That one is asked for it before the first prompt, waits while pdb has it, and gets it back when the
run goes on. The terminal is opened by its name: this process has a session of its own, and its
standard streams are pipes.
"""

from __future__ import annotations

import pdb
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from flexinspect.core.signals import allow_interrupts
from flexinspect_hooks.debugger.debugpy_server import active_pydevd, is_attached
from flexinspect_hooks.debugger.frames import frame_to_stop_in, is_user_frame
from flexinspect_hooks.debugger.stops import announced_stop, stop_reason

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
    return is_attached() or is_ready()


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
            stop_in_pdb(where, reason)
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


GRANT_TIMEOUT_S = 10.0
"""How long an answer of whoever has the terminal is waited for."""

_terminals: list[Terminal] = []
"""The one of this process, where pdb was asked for."""


def use_terminal(name: str, request: Callable[[bool], None]) -> None:
    """Let pdb stop on the terminal of this name, for `breakpoint()`, exceptions and model events.

    `ask` is told True when the terminal is wanted, which `granted` answers, and False when it is
    free again.
    """
    _terminals[:] = [Terminal(name, request)]
    sys.breakpointhook = lambda *args, **kwargs: stop_in_pdb(sys._getframe(1), "breakpoint()")


def is_ready() -> bool:
    """Say whether pdb may stop."""
    return bool(_terminals)


def on_granted() -> None:
    """The terminal is ours."""
    for one in _terminals:
        one.on_granted()


def stop_in_pdb(frame: FrameType, reason: str) -> None:
    """Show pdb's prompt at once in a frame; returns when the run goes on.

    Raises `KeyboardInterrupt` when the user quits.
    """
    for one in _terminals:
        one.pdb().stop(frame, reason)


def post_mortem(error: BaseException) -> None:
    """Show pdb's prompt where an exception came from, if pdb was asked for."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause.__traceback__ is not None:
        for one in _terminals:
            one.pdb().post_mortem(cause)


class Terminal:
    """The user's terminal, lent by whoever has it."""

    def __init__(self, name: str, request: Callable[[bool], None]) -> None:
        self._name, self._request = name, request
        self._is_acquired = False
        self._grant_event = threading.Event()
        self._pdb: TerminalPdb | None = None

    def pdb(self) -> TerminalPdb:
        """Return the debugger on it; one for all stops, as breakpoints are set in it."""
        if self._pdb is None:
            # Two streams: one that reads and writes would have to be able to seek.
            path = Path(self._name)
            reads = path.open(encoding="utf-8")
            writes = path.open("w", encoding="utf-8")
            self._pdb = TerminalPdb(self, reads, writes)
        return self._pdb

    def acquire(self) -> None:
        """Have it, from now to `give_back`."""
        if not self._is_acquired:
            self._is_acquired = True
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()  # what was printed before comes before
            self._grant_event.clear()
            self._request(True)
            self._grant_event.wait(GRANT_TIMEOUT_S)

    def release(self) -> None:
        """The run goes on."""
        if self._is_acquired:
            self._is_acquired = False
            self._request(False)

    def on_granted(self) -> None:
        """It was given."""
        self._grant_event.set()


class TerminalPdb(pdb.Pdb):
    """pdb that borrows its terminal, and whose `quit` ends the run as Ctrl-C does."""

    def __init__(self, terminal: Terminal, reads: Any, writes: Any) -> None:
        super().__init__(stdin=reads, stdout=writes, nosigint=True, readrc=False)
        self.prompt = "(flexinspect pdb) "
        self._terminal = terminal

    def stop(self, frame: FrameType, reason: str) -> None:
        """Prompt at once in `frame`, above the running one, and trace on from there if asked to."""
        self.reset()
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = self.trace_dispatch
            self.botframe, above = above, above.f_back
        self._terminal.acquire()
        with stop_reason(reason):
            self.message(f"> stopped: {reason}")
            self.interaction(frame, None)
        if self.quitting:
            raise KeyboardInterrupt
        if self.stopframe is not self.botframe or self.breaks:
            sys.settrace(self.trace_dispatch)

    def post_mortem(self, error: BaseException) -> None:
        """Prompt where an exception came from, in the user's innermost frame of it."""
        trace = error.__traceback__
        assert trace is not None
        self.reset()
        said = traceback.format_exception_only(error)[-1].strip()
        self._terminal.acquire()
        self.message(f"> {said}")
        with stop_reason(said):
            self.interaction(None, _trim_to_user_frame(trace))
        self._terminal.release()

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Prompt; the terminal is kept between two steps, and given back when the run goes on."""
        self._terminal.acquire()
        last = traceback if isinstance(traceback, TracebackType) else None
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = frame or (last.tb_frame if last is not None else sys._getframe())
        with announced_stop("pdb", where), allow_interrupts():
            super().interaction(frame, traceback)
        if self.quitting or self.stopframe is self.botframe:
            self._terminal.release()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace; a quit ends the run."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except BdbQuit:
            raise KeyboardInterrupt from None


def _trim_to_user_frame(trace: TracebackType) -> TracebackType:
    """Return a traceback that ends in the user's innermost frame, whole where there is none."""
    links = []
    one: TracebackType | None = trace
    while one is not None:
        links.append(one)
        one = one.tb_next
    own = [n for n, link in enumerate(links) if is_user_frame(link.tb_frame)]
    if not own:
        return trace
    made: TracebackType | None = None
    for link in reversed(links[: own[-1] + 1]):
        made = TracebackType(made, link.tb_frame, link.tb_lasti, link.tb_lineno)
    assert made is not None
    return made
