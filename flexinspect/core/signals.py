"""Signals that end a run: Ctrl-C, `kill`, `timeout`, a closed terminal.

Python runs a signal handler between any two bytecode instructions. An exception raised there may
be lost (in a weak reference's callback or a `__del__` it is printed and discarded) or interrupt
the writing of a record. A request is therefore stored as well as raised, and work that must not be
interrupted runs within `defer_interrupts`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of the signal, as after any other signal."""

GRACE_S = 1.5
"""Time that deferred work has to finish after a signal: a step, not minutes of compilation."""

CUT_AFTER_S = 0.5
"""The same for work that may not be interrupted, in a process that has nothing to finish."""

RETRY_INTERVAL_S = 5.0
"""Time after which the exception is raised again if the last one had no effect."""


class SignalInterrupt(KeyboardInterrupt):
    """A signal asked the process to end, as Ctrl-C does; `number` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _EndRequest:
    """The last request to end this process, and the nesting depth of `defer_interrupts`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.n_deferrals = 0
        self.cut: Callable[[], None] | None = None
        self.handled_signals: set[int] = set()


_request = _EndRequest()


def raise_on_signals(*names: str, once: bool = False) -> None:
    """Make these signals, where the system has them, raise `SignalInterrupt` in the main thread.

    With `once`, further signals of the same number are ignored, so that a second one cannot
    interrupt the clean-up that the first one started.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if once:
            signal.signal(number, signal.SIG_IGN)
        _request.number = number
        is_armed = _request.n_deferrals > 0 and _arm_timer()
        if not is_armed and not (_request.n_deferrals and _request.cut):
            raise SignalInterrupt(number)

    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
            _request.handled_signals.add(getattr(signal, name))


def raise_on_end_signals() -> None:
    """Make `kill`, `timeout` and a closed terminal end a command as Ctrl-C does: with clean-up.

    A signal that is ignored (as by `nohup`) or handled already stays so.
    """
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            raise_on_signals(name)


def ignore_end_signals() -> None:
    """Ignore the signals of `raise_on_signals`, while the process finishes its trace and exits."""
    while _request.handled_signals:
        signal.signal(_request.handled_signals.pop(), signal.SIG_IGN)


@contextmanager
def defer_interrupts(*, cut: Callable[[], None] | None = None) -> Iterator[None]:
    """Finish the body first, then raise `SignalInterrupt` if a signal arrived meanwhile.

    After `GRACE_S` the exception is raised inside the body, which may be waiting for a debugger.
    With `cut` it is not, but after `CUT_AFTER_S` `cut` is called, which ends the process: an
    exception within the import system can leave its locks held, after which any import in another
    thread waits forever.

    A request whose exception was lost earlier counts too. An error raised in the body after a
    request is converted to a `SignalInterrupt`: it may be the interrupt in another form.
    """
    _request.n_deferrals += 1
    before, _request.cut = _request.cut, cut
    try:
        with as_interrupt():
            yield
    finally:
        _request.n_deferrals -= 1
        _request.cut = before
        _disarm_timer()
    _raise_if_requested()


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Convert an error that the body raises after a request to end into a `SignalInterrupt`."""
    try:
        yield
    except Exception as error:
        if _request.number is not None:
            raise SignalInterrupt(_request.number) from error
        raise


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Raise Ctrl-C in the body immediately, for instance at a debugger's prompt, and not again."""
    before, n_deferrals = _request.number, _request.n_deferrals
    _request.n_deferrals = 0
    _disarm_timer()
    try:
        yield
    finally:
        _request.n_deferrals = n_deferrals
        if _request.number == signal.SIGINT:
            _request.number = before


def acknowledge_end() -> None:
    """Record that the process is ending: do not raise the request again and ignore further ones.

    The parent process may exit meanwhile, which sends another signal.
    """
    ignore_end_signals()
    _request.number = None


def _raise_if_requested() -> None:
    if _request.number is not None:
        raise SignalInterrupt(_request.number)


def _arm_timer() -> bool:
    """Raise, or cut, after the grace and then repeatedly; False on a system without such timers."""
    if not hasattr(signal, "setitimer"):
        return False

    def end(number: int, frame: FrameType | None) -> None:
        if _request.cut is not None and _request.number is not None:
            _request.cut()
        _raise_if_requested()

    signal.signal(signal.SIGALRM, end)
    grace_s = GRACE_S if _request.cut is None else CUT_AFTER_S
    signal.setitimer(signal.ITIMER_REAL, grace_s, RETRY_INTERVAL_S)
    return True


def _disarm_timer() -> None:
    if _request.number is not None and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def interrupt_signal(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that caused an exception: SIGINT for plain Ctrl-C."""
    return error.number if isinstance(error, SignalInterrupt) else int(signal.SIGINT)


def exit_code_of(error: KeyboardInterrupt) -> int:
    """Return the exit code that a shell reports for a process ended by this signal."""
    return 128 + interrupt_signal(error)


def is_signal_exit_code(code: int) -> bool:
    """Return whether an exit code of our own process means that a signal ended it."""
    return 128 < code <= 128 + max(signal.Signals)
