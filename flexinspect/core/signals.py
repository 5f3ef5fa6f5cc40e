"""Signals that ask a run to end: Ctrl-C, `kill`, `timeout`, a terminal that is closed.

Python runs a signal's handler between any two of its instructions. What it raises there may be
lost (an exception in a weak reference's callback or a `__del__` is printed and forgotten) or leave
half a record behind. So a request is remembered as well as raised, and work that must not be cut
in the middle is done within `defer_interrupts`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number, as after any other signal."""

GRACE_S = 2.0
"""How long work may go on to its end after a signal: a step, not a compilation of minutes."""

RETRY_INTERVAL_S = 5.0
"""How long after an exception that has led nowhere the next one is raised."""


class SignalInterrupt(KeyboardInterrupt):
    """A signal asked for the end, as Ctrl-C does; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _EndRequest:
    """What this process was asked, and whether it is in work that is let come to its end."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.n_deferrals = 0
        self.handled_signals: set[int] = set()


_request = _EndRequest()


def raise_on_signals(*names: str, once: bool = False) -> None:
    """Let these signals raise `Ended` in the main thread, where this system has them.

    With `once` the first of each is the last, so that a second cannot cut short what it began.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if once:
            signal.signal(number, signal.SIG_IGN)
        _request.number = number
        if not _request.n_deferrals or not _arm_timer():
            raise SignalInterrupt(number)

    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
            _request.handled_signals.add(getattr(signal, name))


def ignore_end_signals() -> None:
    """Ignore what `raise_on_signals` took: the process is ending its trace, and then itself."""
    while _request.handled_signals:
        signal.signal(_request.handled_signals.pop(), signal.SIG_IGN)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let what is done inside come to its end, then raise `Ended` if a signal asked meanwhile.

    After `GRACE_S` it is raised inside all the same: what runs may wait for a debugger. A request
    whose exception was lost before counts too, and an error that one was turned into is an `Ended`
    again.
    """
    _request.n_deferrals += 1
    try:
        yield
    except Exception as error:
        if _request.number is not None:
            raise SignalInterrupt(_request.number) from error
        raise
    finally:
        _request.n_deferrals -= 1
        _disarm_timer()
    _raise_if_requested()


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to what runs inside, such as a debugger's prompt: raised at once, then over."""
    before, n_works = _request.number, _request.n_deferrals
    _request.n_deferrals = 0
    _disarm_timer()
    try:
        yield
    finally:
        _request.n_deferrals = n_works
        if _request.number == signal.SIGINT:
            _request.number = before


def acknowledge_end() -> None:
    """Say that what was asked for is being done: it is not raised again, and no other is heard.

    Whoever started us may go meanwhile, which asks a second time.
    """
    ignore_end_signals()
    _request.number = None


def _raise_if_requested() -> None:
    if _request.number is not None:
        raise SignalInterrupt(_request.number)


def _arm_timer() -> bool:
    """Raise after a while, and again until somebody hears; False where there is no such clock."""
    if not hasattr(signal, "setitimer"):
        return False

    def insist(number: int, frame: FrameType | None) -> None:
        _raise_if_requested()

    signal.signal(signal.SIGALRM, insist)
    signal.setitimer(signal.ITIMER_REAL, GRACE_S, RETRY_INTERVAL_S)
    return True


def _disarm_timer() -> None:
    if _request.number is not None and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def interrupt_signal(error: KeyboardInterrupt) -> int:
    """Return the signal that an exception stands for: SIGINT unless it says another."""
    return error.number if isinstance(error, SignalInterrupt) else int(signal.SIGINT)


def exit_code_of(error: KeyboardInterrupt) -> int:
    """Return what a shell gives a program that this signal ended."""
    return 128 + interrupt_signal(error)


def is_signal_exit_code(code: int) -> bool:
    """Say whether an exit code of our own process says that a signal asked for its end."""
    return 128 < code <= 128 + max(signal.Signals)
