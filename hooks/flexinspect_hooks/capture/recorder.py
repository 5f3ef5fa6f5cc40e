"""The writer thread: it takes finished buffers and writes their steps, several at once."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from msgspec import Struct

from flexinspect.core.errors import TraceWriteError
from flexinspect.records import step as step_records
from flexinspect.records.finding import Finding
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import Hook
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.python_internals.threads import background_thread
from flexinspect_hooks.step_writer.step_writer import ReducedStep, SingleRecord, StepWriter

LINGER_S = 0.2
"""How long a step may wait for later steps before it is written.

Between two decode steps the model evicts all CPU caches, and code that runs once per step runs
cold: a step written alone costs three times the CPU of the same step written with seven others
(measured on a model of 18 ms per token); and committing a transaction is more than half of writing
a step. So steps are written five times a second, all waiting ones in one transaction, unless a
`WriteWindow` hides the writer. The first steps of a generation, and all waiting steps when
something ends, are written at once.
"""

SWITCH_S = 5e-6
"""For how long the writer may hold the GIL while the model waits for it, where both have a core.

Each operation of the model releases the GIL and takes it again. By default Python lets a thread
keep the GIL for 5 ms, so that a model lost about as much time as the writer worked, with a free
core or without: at level advanced 10 % of a step of 24 ms. With this interval it loses 3 % (one
torch thread on two cores).
"""

QUEUE_LIMIT = 256
"""Steps that may wait for the disk; past it the model waits, and the wait counts as capture."""

N_IMMEDIATE_STEPS = 2
"""Steps of a generation that are written without waiting, so that a viewer shows them at once."""


class FinishedStep(Struct):
    """A step in the queue of the writer thread. `kept` is what each hook's `reduce` returned.

    `tokens` gives the tokens of its record, and is called in the writer thread, because their ids
    may still be on their way from the device.
    """

    context: StepContext
    buffer: StepBuffer
    kept: tuple[tuple[Hook, Any], ...]
    tokens: Callable[[], tuple[step_records.TokenRecord, ...]] = tuple


Item = FinishedStep | SingleRecord
"""What is written, in order. Other work of the writer thread is queued as a function."""


class Recorder:
    """Owns the writer thread. A full disk stops the recording; it never stops the model.

    A step waits for later steps for up to `linger_s` seconds. Several sessions may share a
    recorder. Each function in `hook_errors` is called for every hook that fails while a step is
    written; a session ignores the hooks of others.
    """

    def __init__(self, sink: TraceWriter, *, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self.writer = StepWriter(sink, self._report_hook_error, self._stop_deferring)
        """Writes what is queued. Once the thread has started, only the thread calls its methods."""
        self._waiting: deque[Any] = deque()
        self._idle: deque[Callable[[], object]] = deque()
        # Putting into it takes half the time of setting an event, and may interrupt itself.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._written = threading.Condition()
        self._put_lock = threading.Lock()
        self._n_put = self._n_done = 0
        self._stopping = False
        self._running_in = 0  # the process in which the thread runs; asking it costs much more
        self.is_asleep = False
        """Whether the writer thread waits to be woken."""
        self._thread = background_thread("flexinspect-writer", self._run)
        self.start = self._thread.start
        self.has_core = False
        """Whether the writer runs on a core that the model does not use."""
        self.writer_s = 0.0
        self.n_writes = 0
        """Increased whenever the writer thread begins to write, and when it is done: then even."""
        self.hook_errors: list[Callable[[Hook, BaseException, StepContext], None]] = []

    @property
    def path(self) -> Path | None:
        """The trace file, None if the sink does not write one."""
        return self.writer.path

    @property
    def failure(self) -> TraceWriteError | None:
        """What ended the recording, None while it goes on."""
        return self.writer.failure

    @property
    def n_steps(self) -> int:
        """How many steps were written."""
        return self.writer.n_steps

    def begin_generation(self, record: step_records.GenerationRecord) -> None:
        """Queue a generation; `begin_rules` follows before its first step."""
        self.put(partial(self.writer.begin_generation, record))

    def begin_rules(self, record: step_records.GenerationRecord, rules: RuleRunner) -> None:
        """Queue that `rules` run on each step of a generation before it is written."""
        self.put(partial(self.writer.begin_rules, record, rules))

    def begin_branch(
        self,
        record: step_records.BranchRecord,
        generation: step_records.GenerationRecord,
        rules: RuleRunner,
    ) -> None:
        """Queue a branch, given as of the fork; its parents' steps are replayed to `rules`."""
        self.put(partial(self.writer.begin_branch, record, generation, rules))

    def put_event(self, event: step_records.EventRecord, rules: RuleRunner) -> None:
        """Queue an event. The rules of its generation run on it, or `rules` if none is open."""
        self.put(partial(self.writer.write_event, event, rules))

    def run_rules(self, event: step_records.EventRecord, rules: RuleRunner) -> None:
        """Queue that rules run on an event that is not written."""
        self.put(partial(self.writer.run_rules, event, rules))

    def explain_finding(self, finding: Finding) -> None:
        """Queue the new severity, sentence and evidence of a finding that was written."""
        self.put(partial(self.writer.explain_finding, finding))

    def put(self, item: Item | Callable[[], Item | None]) -> None:
        """Queue an item to be written, in order. Called from the model's thread.

        A callable is called in the writer thread when everything before it is written; it returns
        the item, or None. The writer is not woken for an ordinary step: a thread that wakes takes
        the GIL from the model.
        """
        if self._running_in != os.getpid() and not self._thread.is_alive():
            return
        with self._put_lock:
            self._waiting.append(item)
            self._n_put += 1
        if not isinstance(item, FinishedStep) or item.context.step < N_IMMEDIATE_STEPS:
            self.wake()
        elif len(self._waiting) > QUEUE_LIMIT:
            self.drain()

    @property
    def is_behind(self) -> bool:
        """Whether anything is queued, or being written."""
        return bool(self._waiting) or self.n_writes % 2 > 0

    def wake(self) -> None:
        """Let the writer thread write what is queued, without waiting for it."""
        self._wakes.put(None)

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call a function in the writer thread once nothing is waiting, before the thread ends."""
        self._idle.append(call)

    def is_current(self) -> bool:
        """Whether the current thread is the writer thread."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until everything queued so far is written."""
        target = self._n_put
        self.wake()
        with self._written:
            self._written.wait_for(lambda: self._n_done >= target or not self._thread.is_alive())

    def stop(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            self.wake()
            self._thread.join()

    def _run(self) -> None:
        self._running_in = os.getpid()
        try:
            self._write_until_stopped()
        finally:
            self._running_in = 0

    def _write_until_stopped(self) -> None:
        while True:
            self._sleep()
            stopping = self._stopping
            if self._waiting:
                self.n_writes += 1
                with _short_switch_interval() if self.has_core else nullcontext():
                    self._write_waiting()
                self.n_writes += 1
            self.writer_s = time.thread_time()
            with self._written:
                self._written.notify_all()
            if self._idle and not self._waiting:
                self._call_idle()
            elif stopping and not self._waiting:
                return

    def _sleep(self) -> None:
        """Wait until the thread is woken, or until steps have waited long enough."""
        self.is_asleep = True
        with suppress(Empty):
            self._wakes.get(timeout=self._linger_s)
            self.is_asleep = False
            while True:  # once awake, it sees what all others woke it for
                self._wakes.get_nowait()
        self.is_asleep = False

    def _call_idle(self) -> None:
        call = self._idle.popleft()
        with suppress(Exception):  # the writer reports a failed disk itself, and must go on
            call()
        self.wake()  # something may wait now, or the thread has to end

    def _write_waiting(self) -> None:
        while self._waiting:
            steps: list[FinishedStep] = []  # those at the head of the queue, up to anything else
            while self._waiting and isinstance(self._waiting[0], FinishedStep):
                steps.append(self._waiting.popleft())
            if steps:
                self.writer.guard(partial(self._write_steps, steps))
            else:
                self.writer.guard(partial(self.writer.write, self._waiting.popleft()))
            self._n_done += len(steps) or 1

    def _write_steps(self, steps: Sequence[FinishedStep]) -> None:
        if self.writer.failure is None:
            self.writer.write_steps([self._reduced(step) for step in steps])

    def _reduced(self, item: FinishedStep) -> ReducedStep:
        """Take the tokens, and the buffer's values; a hook whose values failed is skipped."""
        step, tokens, kept = item.context, item.tokens(), item.kept
        if step.token_id is None:
            chosen = (token.token_id for token in tokens if token.step == step.step)
            step.token_id = next(chosen, None)
        failed: list[Hook] = []

        def report(hook: Hook, error: Exception) -> None:
            failed.append(hook)
            self.writer.report_failed(hook, error, step)

        values = item.buffer.values(report)
        if failed:
            kept = tuple(pair for pair in kept if pair[0] not in failed)
        return ReducedStep(step, kept, values, tokens)

    def _report_hook_error(self, hook: Any, error: Exception, step: Any) -> None:
        for report in tuple(self.hook_errors):
            report(hook, error, step)

    def _stop_deferring(self, hook: Any) -> None:
        hook.stop_deferring()


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Give the GIL to any thread that waits for it almost at once, while this one writes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:  # else the program changed it meanwhile
            sys.setswitchinterval(before)


_HINT = "Please report this. The records in the trace are correct, but some are missing."


def lost_records(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return an error if records are missing; None if none are, or if writing to disk failed."""
    if writer.failed:
        return None  # the trace reports a failed disk itself, and the model ran on
    if recorder.failure is not None:
        return TraceWriteError(recorder.failure.message, hint=recorder.failure.hint or _HINT)
    if recorder.writer.refused:
        n, first = len(recorder.writer.refused), recorder.writer.refused[0]
        count = f"{n} records could not be stored. The first error: " if n > 1 else ""
        return TraceWriteError(f"The trace is incomplete: {count}{first}", hint=_HINT)
    return None


def recording_error(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return the error to report at the end: missing records, or what ended the recording."""
    return lost_records(recorder, writer) or recorder.failure
