"""Threads that load what a screen shows, and that do not keep the process from ending.

`ThreadPoolExecutor` is joined when Python exits: a panel of another package that hangs in its load
would keep the interface in memory after it was left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Work = tuple[Future[Any], Callable[[], Any]]

CLOSE_WITHIN_S = 1.0
"""How long the end of the process waits for loads."""


class LoadThreads(Executor):
    """At most `n_threads` threads, which start when they are needed; work is done in order."""

    def __init__(self, n_threads: int, name: str) -> None:
        self._n_threads, self._name = n_threads, name
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._n_idle = 0
        self._is_over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError("the screen has been closed")
            self._work.put((future, lambda: fn(*args, **kwargs)))
            if self._n_idle < self._work.qsize() and len(self._threads) < self._n_threads:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; cancel what waits if `cancel_futures`. `wait` for the threads."""
        with self._lock:
            self._is_over = True
            waiting: list[Work] = []
            while cancel_futures and not self._work.empty():
                if (work := self._work.get()) is not None:
                    waiting.append(work)
            for _ in self._threads:
                self._work.put(None)
        for future, _ in waiting:
            future.cancel()
        if wait:
            self.join(None)

    def join(self, timeout_s: float | None = CLOSE_WITHIN_S) -> bool:
        """Wait until the threads have ended; return False if they have not within the time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._n_idle += 1
            work = self._work.get()
            with self._lock:
                self._n_idle -= 1
            if work is None:
                return
            future, call = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del work, future, call  # they hold a trace while the thread waits
