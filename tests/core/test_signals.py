"""Signals that end a run: which exit code each leaves, what they may cut, and what they may not."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flexinspect.core import signals
from flexinspect.core.signals import (
    as_interrupt,
    defer_interrupts,
    exit_code_of,
    ignore_end_signals,
    interrupt_signal,
    is_signal_exit_code,
    raise_on_signals,
)
from flexinspect.launch.child_process import Capture

NAMES = ("SIGINT", "SIGTERM", "SIGALRM")


@pytest.fixture(autouse=True)
def signals_put_back() -> Iterator[None]:
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    signals._request.handled_signals.clear()
    signals.acknowledge_end()


class Called(Capture):
    display_name = "The capture process"


class Thing:
    """Something that can be referred to weakly."""


def ask(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), getattr(signal, name))


def test_the_exception_of_a_signal_has_its_number() -> None:
    raise_on_signals("SIGTERM", "SIGNOWHERE", once=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        ask()
    ask()  # once: ignored
    assert (interrupt_signal(caught.value), exit_code_of(caught.value)) == (signal.SIGTERM, 143)
    assert exit_code_of(KeyboardInterrupt()) == 130


def test_work_that_is_let_end_is_done_before_the_run_ends() -> None:
    raise_on_signals("SIGINT")
    done = []
    with pytest.raises(signals.SignalInterrupt), defer_interrupts():
        ask("SIGINT")
        ask("SIGINT")
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_work_that_waits_is_cut_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "GRACE_S", 0.05)
    raise_on_signals("SIGINT")
    began = time.monotonic()
    with pytest.raises(signals.SignalInterrupt), defer_interrupts():
        ask("SIGINT")
        time.sleep(60.0)
    assert time.monotonic() - began < 30.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_whose_exception_is_lost_is_raised_at_the_next_work() -> None:
    raise_on_signals("SIGINT")
    thing = Thing()
    reference = weakref.ref(thing, lambda _: ask("SIGINT"))
    del thing  # the callback's exception is printed and forgotten
    assert reference() is None
    with pytest.raises(signals.SignalInterrupt), defer_interrupts():
        pass


def test_an_error_that_a_request_was_turned_into_is_the_request_again() -> None:
    raise_on_signals("SIGTERM")
    with pytest.raises(signals.SignalInterrupt) as caught, defer_interrupts():
        ask()
        raise RuntimeError("a callback failed")
    assert exit_code_of(caught.value) == 143
    assert str(caught.value.__cause__) == "a callback failed"


def test_errors_without_a_request_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="as it was"), defer_interrupts():
        raise RuntimeError("as it was")


def test_a_signal_being_handled_is_not_raised_again() -> None:
    raise_on_signals("SIGINT")
    with pytest.raises(signals.SignalInterrupt):
        ask("SIGINT")
    signals.acknowledge_end()
    with defer_interrupts():
        ask("SIGINT")  # as of a starter that is gone: the trace is being closed


def test_ctrl_c_at_a_prompt_within_work_is_handled_there() -> None:
    raise_on_signals("SIGINT")
    with defer_interrupts():
        with pytest.raises(signals.SignalInterrupt), signals.allow_interrupts():
            ask("SIGINT")
    with defer_interrupts():
        pass


def test_another_signal_at_a_prompt_within_work_ends_the_run_all_the_same() -> None:
    raise_on_signals("SIGTERM")
    with pytest.raises(signals.SignalInterrupt), defer_interrupts():
        with suppress(KeyboardInterrupt), signals.allow_interrupts():
            ask("SIGTERM")


def test_while_a_trace_is_closed_nothing_interrupts() -> None:
    raise_on_signals("SIGINT")
    ignore_end_signals()
    ask("SIGINT")
    ask("SIGINT")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_signals_of_others_are_left_alone() -> None:
    mine = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGINT, mine)
    ignore_end_signals()
    assert signal.getsignal(signal.SIGINT) is mine


def test_exit_codes_of_requests_are_distinguished_from_others() -> None:
    assert [
        code for code in (-15, 0, 1, 2, 3, 128, 130, 143, 255) if is_signal_exit_code(code)
    ] == [
        130,
        143,
    ]


def test_a_capture_process_that_was_asked_to_end_names_the_signal() -> None:
    assert Called().describe_exit(143) == "The capture process was ended by SIGTERM."
    assert Called().describe_exit(3) == "The capture process ended with exit code 3."


def test_a_body_that_must_not_be_cut_ends_the_process_after_the_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "CUT_AFTER_S", 0.01)
    raise_on_signals("SIGTERM")

    def end_now() -> None:
        raise SystemExit(9)  # in place of os._exit

    with pytest.raises(SystemExit, match="9"), defer_interrupts(cut=end_now):
        ask()
        time.sleep(5)


def test_an_error_after_a_request_is_the_interrupt() -> None:
    with pytest.raises(ValueError, match="own"), as_interrupt():
        raise ValueError("own")
    raise_on_signals("SIGINT")
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        with suppress(KeyboardInterrupt):
            ask("SIGINT")
        raise ImportError("Could not import module 'LlamaConfig'")
