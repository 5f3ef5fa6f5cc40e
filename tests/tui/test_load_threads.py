"""Threads of a screen: they work in order, and a load that hangs does not keep the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from flexinspect.tui.load_threads import LoadThreads


def test_calls_run_in_order_in_at_most_that_many_threads() -> None:
    threads, names = LoadThreads(2, "test"), list[str]()
    both = threading.Barrier(2, timeout=60)

    def work(number: int) -> int:
        names.append(threading.current_thread().name)
        if number < 2:
            both.wait()  # two run at once
        return number * number

    futures = [threads.submit(work, number) for number in range(20)]
    assert [future.result(60) for future in futures] == [number**2 for number in range(20)]
    assert set(names) == {"test_0", "test_1"}
    threads.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(work, 1)


def test_a_thread_that_is_idle_takes_the_next_call() -> None:
    threads = LoadThreads(8, "test")
    for _ in range(5):
        threads.submit(time.sleep, 0).result(60)
        time.sleep(0.01)
    assert len(threads._threads) == 1
    threads.shutdown()


def test_an_exception_is_that_of_the_call() -> None:
    threads = LoadThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(60)
    assert threads.submit(lambda: 3).result(60) == 3
    threads.shutdown()


def test_what_waits_at_the_end_is_cancelled_and_what_hangs_is_left() -> None:
    threads, began, goes_on = LoadThreads(1, "test"), threading.Event(), threading.Event()
    hangs = threads.submit(lambda: began.set() or goes_on.wait())
    waits = threads.submit(lambda: 1)
    assert began.wait(10)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waits.cancelled()
    assert not threads.join(0.05)
    goes_on.set()
    assert hangs.result(60)
    assert threads.join(10)


def test_a_load_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import threading; from flexinspect.tui.load_threads import LoadThreads; "
        "LoadThreads(1, 'test').submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
