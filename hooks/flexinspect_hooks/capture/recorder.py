"""The writer thread: it takes finished buffers, lets hooks make records of them, commits them."""

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
from typing import Any

from msgspec import Struct, field

from flexinspect.core.errors import TraceWriteError
from flexinspect.records import step as step_records
from flexinspect.records.finding import Finding
from flexinspect.records.step import GradientRecord
from flexinspect.rules.engine import RuleResults, RuleRunner
from flexinspect.rules.run_failures import failure_finding
from flexinspect.trace.file.writer import NO_MEMORY, TraceWriter
from flexinspect.trace.replay import replay_parents_from_path
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import Hook
from flexinspect_hooks.capture.size_limit import SizeLimit
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.python_internals.threads import background_thread
from flexinspect_hooks.step_writer.step_draft import StepDraft
from flexinspect_hooks.step_writer.values import Values

LINGER_S = 0.2
"""How long a step may wait for later steps before it is written.

Between two decode steps the model evicts all CPU caches, and code that runs once per step runs
cold: a step written alone costs three times the CPU of the same step written with seven others
(measured on a model of 18 ms per token); and committing a transaction is more than half of writing
a step. So steps are written five times a second, all waiting ones in one transaction. The first
steps of a generation, and all waiting steps when something ends, are written at once.
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
    may still be on their way from the device. The writer thread sets `values` and `draft`.
    """

    context: StepContext
    buffer: StepBuffer
    kept: tuple[tuple[Hook, Any], ...]
    tokens: Callable[[], tuple[step_records.TokenRecord, ...]] = tuple
    draft: StepDraft = None  # type: ignore[assignment]  # set by the writer thread
    values: Values = field(default_factory=dict)


Item = FinishedStep | step_records.GenerationEnd | step_records.EventRecord | GradientRecord
"""What is written, in order. Other work of the writer thread is queued as a function."""


class Recorder:
    """Owns the writer thread. A full disk stops the recording; it never stops the model.

    A step waits for later steps for up to `linger_s` seconds. Several sessions may share a
    recorder. Each function in `hook_errors` is called for every hook that fails while a step is
    written; a session ignores the hooks of others.
    """

    def __init__(self, sink: TraceWriter, *, linger_s: float = LINGER_S) -> None:
        self._sink, self._linger_s = sink, linger_s
        self._rule_runners: dict[tuple[int, int], RuleRunner] = {}
        self._rule_names: set[str] = set()
        self._rule_memory: dict[str, Any] = {}
        self._waiting: deque[Any] = deque()
        self._idle: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._written = threading.Condition()
        self._put_lock = threading.Lock()
        self._n_put = self._n_done = 0
        self._stopping = False
        self._running_in = 0  # the process in which the thread runs; asking it costs much more
        self._thread = background_thread("flexinspect-writer", self._run)
        self.start = self._thread.start
        self.has_core = False
        """Whether the writer runs on a core that the model does not use."""
        self.failure: TraceWriteError | None = None
        self.refused: list[str] = []
        """Errors of records that could not be stored, in order, where recording continued."""
        self.writer_s = 0.0
        self.n_writes = 0
        """Increased whenever the writer thread begins to write, and when it is done: then even."""
        self.n_steps = 0
        self.hook_errors: list[Callable[[Hook, BaseException, StepContext], None]] = []
        self._failed_hooks: list[Hook] = []
        self.evaluator: Any = None
        """The `BreakpointEvaluator` of what was written, in this thread; None without one."""
        self.size_limit: SizeLimit | None = None

    @property
    def path(self) -> Path | None:
        """The trace file, None if the sink does not write one."""
        return getattr(self._sink, "recording_path", None)

    def begin_generation(self, record: step_records.GenerationRecord) -> None:
        """Queue a generation; `begin_rules` follows before its first step."""
        self.put(lambda: self._sink.begin_generation(record))

    def begin_rules(self, record: step_records.GenerationRecord, rules: RuleRunner) -> None:
        """Queue that `rules` run on each step of a generation before it is written."""

        def begin() -> None:
            self._rule_runners[record.generation, 0] = rules
            rules.share_memory(self._rule_memory)
            if not self._rule_names.issuperset(rules.names):
                # Stored, so that offline checks skip the rules that ran live.
                self._rule_names.update(rules.names)
                self._sink.update_run(rules=sorted(self._rule_names))
            for event in rules.on_generation_start(record):
                self._sink.write_event(event)

        self.put(begin)

    def begin_branch(
        self,
        record: step_records.BranchRecord,
        generation: step_records.GenerationRecord,
        rules: RuleRunner,
    ) -> None:
        """Queue a branch, given as of the fork; its parents' steps are replayed to `rules`."""

        def begin() -> None:
            place = (record.generation, record.branch, record.parent, record.fork_step)
            self._sink.begin_branch(*place, record.change, record.segments)
            events = [*rules.on_generation_start(generation)]
            if self.path is not None and not record.recomputed:
                events += replay_parents_from_path(self.path, *place[:2], rules)
            self._rule_runners[record.generation, record.branch] = rules
            for event in events:
                self._sink.write_event(event)

        self.put(begin)

    def put_event(self, event: step_records.EventRecord, rules: RuleRunner) -> None:
        """Queue an event. The rules of its generation run on it, or `rules` if none is open."""
        self.put(partial(self._write_event, event, rules))

    def run_rules(self, event: step_records.EventRecord, rules: RuleRunner) -> None:
        """Queue that rules run on an event that is not written."""
        self.put(lambda: self._write_results(rules.on_record(event)))

    def explain_finding(self, finding: Finding) -> None:
        """Queue the new severity, sentence and evidence of a finding that was written."""
        self.put(lambda: self._sink.explain_finding(finding))

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
            self._wake.set()
        elif len(self._waiting) > QUEUE_LIMIT:
            self.drain()

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call a function in the writer thread once nothing is waiting, before the thread ends."""
        self._idle.append(call)

    def is_current(self) -> bool:
        """Whether the current thread is the writer thread."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until everything queued so far is written."""
        target = self._n_put
        self._wake.set()
        with self._written:
            self._written.wait_for(lambda: self._n_done >= target or not self._thread.is_alive())

    def stop(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            self._wake.set()
            self._thread.join()

    def _run(self) -> None:
        self._running_in = os.getpid()
        try:
            self._write_until_stopped()
        finally:
            self._running_in = 0

    def _write_until_stopped(self) -> None:
        while True:
            self._wake.wait(self._linger_s)
            self._wake.clear()
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

    def _call_idle(self) -> None:
        call = self._idle.popleft()
        with suppress(Exception):  # the writer reports a failed disk itself, and must go on
            call()
        self._wake.set()  # something may wait now, or the thread has to end

    def _write_waiting(self) -> None:
        while self._waiting:
            steps: list[FinishedStep] = []  # those at the head of the queue, up to anything else
            while self._waiting and isinstance(self._waiting[0], FinishedStep):
                steps.append(self._waiting.popleft())
            n_items = len(steps) or 1
            try:
                if steps:
                    self._write_steps(steps)
                else:
                    self._write(self._waiting.popleft())
            except TraceWriteError as error:
                # A single record that could not be stored does not end the recording.
                self.failure = error if getattr(self._sink, "failed", True) else None
                self.refused += [error.message, *error.others]
            except MemoryError:
                hint = "The steps in the trace are correct; the generation itself continues."
                self.failure = TraceWriteError(f"Recording stopped: {NO_MEMORY}.", hint=hint)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self.failure = TraceWriteError(f"Recording stopped at an internal error: {message}")
            finally:
                self._n_done += n_items

    def _write(self, item: Any) -> None:
        if self.failure is not None:
            return
        if callable(item) and (item := item()) is None:
            return
        if isinstance(item, step_records.GenerationEnd):
            key = (item.generation, item.branch)
            if (rules := self._rule_runners.pop(key, None)) is not None:
                self._write_results(rules.on_generation_end())
            self._sink.end_generation(item)
        elif isinstance(item, GradientRecord):
            self._sink.write_gradients(item)
            if (rules := self._rule_runners.get((item.generation, item.branch))) is not None:
                results = rules.on_record(item)
                self._write_results(results)
                if results.repeats:
                    place = (item.generation, item.branch, item.step)
                    self._sink.write_repeats(place, results.repeats)
        else:
            self._write_event(item, None)

    def _write_event(self, event: step_records.EventRecord, rules: RuleRunner | None) -> None:
        self._sink.write_event(event)
        if event.generation is not None:
            branches = (key for key in reversed(self._rule_runners) if key[0] == event.generation)
            newest = next(branches, None)
            rules = rules if newest is None else self._rule_runners[newest]
        if rules is not None:
            self._write_results(rules.on_record(event))
        elif (finding := failure_finding(event)) is not None:
            self._sink.write_findings([finding])

    def _write_results(self, results: RuleResults) -> None:
        """Write findings that do not belong to a step, and events of rules that failed."""
        if findings := results.findings:
            self._sink.write_findings(findings)
            if self.evaluator is not None:
                self.evaluator.evaluate_findings(findings, findings[0].generation)
        for event in results.events:
            self._sink.write_event(event)

    def _write_steps(self, items: Sequence[FinishedStep]) -> None:
        if self.failure is not None:
            return
        records, error = self._records(items), None
        if self.size_limit is not None:
            records = self._thinned(self.size_limit, records)
            if not records:
                return
        try:
            self._sink.write_steps(records)
        except TraceWriteError as raised:
            records, error = [records[index] for index in raised.stored], raised
        self.n_steps += len(records)
        if self.evaluator is not None:
            for record in records:
                self.evaluator.evaluate(record)
        if error is not None:
            raise error

    def _thinned(
        self, limit: SizeLimit, records: list[step_records.StepRecord]
    ) -> list[step_records.StepRecord]:
        """Return what a size limit leaves of some steps, and write the events of its changes."""
        kept = limit.thin(records)
        while limit.events:
            self._sink.write_event(limit.events.pop(0))
        return kept

    def _records(self, items: Sequence[FinishedStep]) -> list[step_records.StepRecord]:
        """Turn steps into records, one kind of work after the other.

        Work on a single step finds its code and tables evicted from the CPU caches: the rules cost
        four times as much between the matrix products of two steps as in a row.
        """
        for item in items:
            self._take_values(item)
        for number in range(max(len(item.kept) for item in items)):
            for item in items:
                # In order, because later hooks read the records of earlier ones.
                for hook, kept in item.kept[number : number + 1]:
                    if self._failed_hooks and hook in self._failed_hooks:
                        continue  # it failed at an earlier step, after this one was queued
                    try:
                        hook.record(item.context, kept, item.values, item.draft)
                    except Exception as error:
                        self._report_hook_error(hook, error, item.context)
                    if item.draft.are_values_lost:
                        item.draft.are_values_lost = False
                        hook.stop_deferring()
        records = []
        for item in items:
            record = item.draft.assemble()
            rules = self._rule_runners.get((record.generation, record.branch))
            records.append(record if rules is None else rules.on_step(record))
        return records

    def _take_values(self, item: FinishedStep) -> None:
        """Take the tokens, and the buffer's values; a hook whose values failed is skipped."""
        step, tokens = item.context, item.tokens()
        item.draft = StepDraft(step, tokens=tokens)
        if step.token_id is None:
            chosen = (token.token_id for token in tokens if token.step == step.step)
            step.token_id = next(chosen, None)

        def report(hook: Hook, error: Exception) -> None:
            item.kept = tuple(pair for pair in item.kept if pair[0] is not hook)
            self._report_hook_error(hook, error, step)

        item.values = item.buffer.values(report)

    def _report_hook_error(self, hook: Hook, error: Exception, step: StepContext) -> None:
        self._failed_hooks.append(hook)
        for report in tuple(self.hook_errors):
            report(hook, error, step)


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
    if recorder.refused:
        n, first = len(recorder.refused), recorder.refused[0]
        count = f"{n} records could not be stored. The first error: " if n > 1 else ""
        return TraceWriteError(f"The trace is incomplete: {count}{first}", hint=_HINT)
    return None


def recording_error(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return the error to report at the end: missing records, or what ended the recording."""
    return lost_records(recorder, writer) or recorder.failure
