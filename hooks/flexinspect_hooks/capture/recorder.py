"""The writer thread: takes finished buffers, lets hooks turn them into records, commits them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flexinspect.core.errors import TraceWriteError
from flexinspect.records.finding import Finding, Repeat
from flexinspect.records.prompt import Segment
from flexinspect.records.step import (
    BranchRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.replay import replay_parents_from_path
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import Hook, StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.interpreter.threads import keep_running_when_stopped

LINGER_S = 0.2
"""How long a step may wait for company before it is written.

Between two decode steps the model sweeps every cache, and code that runs once per step runs cold: a
step written alone costs three times the CPU of the same step written with seven others (measured
on a model of 18 ms per token); and committing a transaction is more than half of writing a step. So
steps are written five times a second, those that waited together in one transaction. The first
steps of a generation, and whatever is waiting when anything ends, are written at once.
"""

SWITCH_S = 5e-6
"""For how long the writer keeps the interpreter from a model that wants it, where both have a core.

Each operation of the model lets go of the interpreter and wants it back. Python lets a thread that
has it go on for 5 ms, so that a model lost about as much time as the writer worked, core or not: at
level advanced 10 % of a step of 24 ms, where it loses 3 % so (one torch thread on two cores).
"""

QUEUE_LIMIT = 256
"""Steps that may wait for the disk; past it the model waits, and the wait counts as capture."""

N_IMMEDIATE_STEPS = 2
"""Steps of a generation that are written without lingering: a first sign of life."""


class Sink(Protocol):
    """Where records go; `flexinspect.trace.file.writer.TraceWriter` is one."""

    def update_run(self, **facts: Any) -> None: ...
    def begin_generation(self, record: GenerationRecord) -> None: ...
    def begin_branch(
        self,
        generation: int,
        branch: int,
        parent: int,
        fork_step: int,
        change: Mapping[str, Any] | None = None,
        segments: Sequence[Segment] = (),
    ) -> None: ...
    def write_steps(self, records: Sequence[StepRecord]) -> None: ...
    def write_gradients(self, record: GradientRecord) -> None: ...
    def write_repeats(self, place: tuple[int, int, int], records: Sequence[Repeat]) -> None: ...
    def write_event(self, record: EventRecord) -> None: ...
    def write_findings(self, findings: Iterable[Finding]) -> None: ...
    def end_generation(self, record: GenerationEnd) -> None: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step on its way to the writer thread. `kept` is what each hook's `reduce` returned.

    `tokens` gives the tokens of its record, and is called in the writer thread, because their ids
    may still be on their way from the device.
    """

    context: StepContext
    buffer: StepBuffer
    kept: tuple[tuple[Hook, Any], ...]
    tokens: Callable[[], tuple[TokenRecord, ...]] = tuple

    def take_tokens(self) -> tuple[TokenRecord, ...]:
        """Return the tokens, and tell the step which of them it chose."""
        step, tokens = self.context, self.tokens()
        if step.token_id is None:
            step.token_id = next((t.token_id for t in tokens if t.step == step.step), None)
        return tokens


Item = GenerationRecord | GenerationEnd | EventRecord | GradientRecord


class Judge(Protocol):
    """Who looks at what was written, in the writer thread."""

    def evaluate(self, record: StepRecord) -> None: ...
    def evaluate_findings(self, findings: Sequence[Finding], generation: int) -> None: ...


class _GenerationStarted(NamedTuple):
    """A generation that begins, and the rules that are to look at its steps."""

    record: GenerationRecord
    rule_runner: RuleRunner


class _BranchStarted(NamedTuple):
    """A branch that begins, the generation as it is there, and rules that have seen nothing yet."""

    record: BranchRecord
    generation: GenerationRecord
    rule_runner: RuleRunner


class _EventQueued(NamedTuple):
    """An event outside of every generation, and the rules of the session that tells it."""

    event: EventRecord
    rule_runner: RuleRunner


class Recorder:
    """Owns the writer thread. A full disk stops the recording; it never stops the model.

    A step waits for company for up to `linger_s`. Several sessions may share one. Each function in
    `hook_errors` is told of every hook that failed while a step was written, and knows its own.
    """

    def __init__(self, sink: Sink, *, linger_s: float = LINGER_S) -> None:
        self._sink, self._linger_s = sink, linger_s
        self._rule_runners: dict[tuple[int, int], RuleRunner] = {}
        self._rule_names: set[str] = set()
        self._rule_memory: dict[str, Any] = {}
        self._waiting: deque[Any] = deque()
        self._wake = threading.Event()
        self._written = threading.Condition()
        self._put_lock = threading.Lock()
        self._n_put = self._n_done = 0
        self._stopping = False
        writer = threading.Thread(target=self._run, name="flexinspect-writer", daemon=True)
        self._thread = keep_running_when_stopped(writer)
        self.has_core = False
        """Whether the writer runs on a core that the model does not use."""
        self.failure: TraceWriteError | None = None
        self.refused: list[str] = []
        """Why records could not be stored, in order, where recording went on."""
        self.writer_s = 0.0
        self.n_steps = 0
        self.hook_errors: list[Callable[[Hook, BaseException, StepContext], None]] = []
        self.judge: Judge | None = None
        """Judges what was written, where there may be breakpoints."""

    @property
    def path(self) -> Path | None:
        """The file that is written, None where there is none."""
        return getattr(self._sink, "recording_path", None)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin_generation(self, record: GenerationRecord, rules: RuleRunner) -> None:
        """Queue a generation; `rules` look at each of its steps before that is written."""
        self.put(_GenerationStarted(record, rules))

    def begin_branch(
        self, record: BranchRecord, generation: GenerationRecord, rules: RuleRunner
    ) -> None:
        """Queue a branch; `rules` are new ones, which are shown what its parents did before it."""
        self.put(_BranchStarted(record, generation, rules))

    def put_event(self, event: EventRecord, rules: RuleRunner) -> None:
        """Queue an event; `rules` hear it if no generation is open that it belongs to."""
        self.put(_EventQueued(event, rules))

    def put(
        self,
        item: FinishedStep
        | Item
        | _GenerationStarted
        | _BranchStarted
        | _EventQueued
        | Callable[[], Item | None],
    ) -> None:
        """Queue something to be written, in order. Called from the model's thread.

        A callable is asked for it in the writer thread, when everything before it is written; it
        may have nothing to be written.
        Nothing is woken for an ordinary step: a thread that is woken takes the interpreter from the
        model.
        """
        if not self._thread.is_alive():
            return
        with self._put_lock:
            self._waiting.append(item)
            self._n_put += 1
        if not isinstance(item, FinishedStep) or item.context.step < N_IMMEDIATE_STEPS:
            self._wake.set()
        elif len(self._waiting) > QUEUE_LIMIT:
            self.drain()

    def is_current(self) -> bool:
        """Say whether this is the writer thread."""
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
        while True:
            self._wake.wait(self._linger_s)
            self._wake.clear()
            stopping = self._stopping
            if self._waiting:
                with _short_switch_interval() if self.has_core else nullcontext():
                    self._write_waiting()
            self.writer_s = time.thread_time()
            with self._written:
                self._written.notify_all()
            if stopping and not self._waiting:
                return

    def _write_waiting(self) -> None:
        while self._waiting:
            steps = self._take_steps()
            n_items = len(steps) or 1
            try:
                if steps:
                    self._write_steps(steps)
                else:
                    self._write(self._waiting.popleft())
            except TraceWriteError as error:
                # A record that could not be stored is not the end of the recording.
                self.failure = error if getattr(self._sink, "failed", True) else None
                self.refused += [error.message, *error.others]
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self.failure = TraceWriteError(f"Recording stopped at an internal error: {what}")
            finally:
                self._n_done += n_items

    def _take_steps(self) -> list[FinishedStep]:
        """Take the steps at the head of the queue, up to anything else."""
        steps: list[FinishedStep] = []
        while self._waiting and isinstance(self._waiting[0], FinishedStep):
            steps.append(self._waiting.popleft())
        return steps

    def _write(self, item: Any) -> None:
        if self.failure is not None:
            return
        if callable(item) and (item := item()) is None:
            return
        if isinstance(item, _GenerationStarted):
            self._rule_runners[item.record.generation, 0] = item.rule_runner
            item.rule_runner.share_memory(self._rule_memory)
            self._record_rule_names(item.rule_runner.names)
            self._sink.begin_generation(item.record)
            for event in item.rule_runner.on_generation_start(item.record):
                self._sink.write_event(event)
        elif isinstance(item, _BranchStarted):
            self._write_branch(item)
        elif isinstance(item, GenerationEnd):
            key = (item.generation, item.branch)
            if (rules := self._rule_runners.pop(key, None)) is not None:
                self._write_findings(*rules.on_generation_end())
            self._sink.end_generation(item)
        elif isinstance(item, GradientRecord):
            self._sink.write_gradients(item)
            if (rules := self._rule_runners.get((item.generation, item.branch))) is not None:
                found, repeats, events = rules.on_gradients(item)
                self._write_findings(found, events)
                if repeats:
                    self._sink.write_repeats((item.generation, item.branch, item.step), repeats)
        elif isinstance(item, _EventQueued):
            self._write_event(item.event, item.rule_runner)
        else:
            self._write_event(item, None)

    def _write_branch(self, item: _BranchStarted) -> None:
        record, rules = item.record, item.rule_runner
        place = (record.generation, record.branch, record.parent, record.fork_step)
        self._sink.begin_branch(*place, record.change, record.segments)
        events = [*rules.on_generation_start(item.generation)]
        if self.path is not None and not record.recomputed:
            events += replay_parents_from_path(self.path, record.generation, record.branch, rules)
        self._rule_runners[record.generation, record.branch] = rules
        for event in events:
            self._sink.write_event(event)

    def _write_event(self, event: EventRecord, rules: RuleRunner | None) -> None:
        self._sink.write_event(event)
        if event.generation is not None:
            newest = (n for n in reversed(self._rule_runners) if n[0] == event.generation)
            key = next(newest, None)
            rules = rules if key is None else self._rule_runners[key]
        if rules is not None:
            self._write_findings(*rules.on_event(event))

    def _record_rule_names(self, names: Sequence[str]) -> None:
        """Say in the manifest which rules look, so that nobody asks them a second time."""
        if not self._rule_names.issuperset(names):
            self._rule_names.update(names)
            self._sink.update_run(rules=sorted(self._rule_names))

    def _write_findings(self, findings: Sequence[Finding], events: Sequence[EventRecord]) -> None:
        """Write what rules found outside of the steps, and which of them failed at it."""
        if findings:
            self._sink.write_findings(findings)
            if self.judge is not None:
                self.judge.evaluate_findings(findings, findings[0].generation)
        for event in events:
            self._sink.write_event(event)

    def _write_steps(self, items: Sequence[FinishedStep]) -> None:
        if self.failure is not None:
            return
        records = self._records(items)
        try:
            self._sink.write_steps(records)
        except TraceWriteError as error:
            self._count([records[place] for place in error.stored])
            raise
        self._count(records)

    def _count(self, records: Sequence[StepRecord]) -> None:
        """Count steps that were written, and have them judged."""
        self.n_steps += len(records)
        if self.judge is not None:
            for record in records:
                self.judge.evaluate(record)

    def _records(self, items: Sequence[FinishedStep]) -> list[StepRecord]:
        """Turn steps into records, one kind of work after the other.

        What is done for one step alone finds its code and tables gone from the caches: the rules
        cost four times as much between the products of two steps as in a row.
        """
        drafts = [StepAssembler(item) for item in items]
        for draft in drafts:
            draft.collect_values(self._report_hook_error)
        for number in range(max(draft.n_hooks for draft in drafts)):
            for draft in drafts:
                draft.run_hook(number, self._report_hook_error)
        return [self._run_rules(draft.assemble()) for draft in drafts]

    def _report_hook_error(self, hook: Hook, error: Exception, step: StepContext) -> None:
        for tell in tuple(self.hook_errors):
            tell(hook, error, step)

    def _run_rules(self, record: StepRecord) -> StepRecord:
        rules = self._rule_runners.get((record.generation, record.branch))
        return rules.on_step(record) if rules is not None else record


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Let every thread have the interpreter back at once, while this one writes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:  # else the program has set it meanwhile
            sys.setswitchinterval(before)


OnHookFailed = Callable[[Hook, Exception, StepContext], None]
"""Told of a hook that failed at a step."""


class StepAssembler:
    """A step while it becomes a record; a hook that fails is not asked for more of it."""

    def __init__(self, item: FinishedStep) -> None:
        self._item, self._step, self._draft = item, item.context, StepDraft()
        self._failed_hooks: list[Hook] = []
        self._tokens = item.take_tokens()
        self._values: Values = {}

    def collect_values(self, on_failed: OnHookFailed) -> None:
        """Take what was sent."""

        def unmade(hook: Hook, error: Exception) -> None:
            self._failed_hooks.append(hook)
            on_failed(hook, error, self._step)

        self._values = self._item.buffer.values(unmade)

    @property
    def n_hooks(self) -> int:
        """How many hooks have something to say."""
        return len(self._item.kept)

    def run_hook(self, number: int, on_failed: OnHookFailed) -> None:
        """Let a hook write its part; one after the other, as later ones read what others wrote."""
        if number >= len(self._item.kept):
            return
        hook, kept = self._item.kept[number]
        if hook in self._failed_hooks:
            return
        try:
            hook.record(self._step, kept, self._values, self._draft)
        except Exception as error:
            on_failed(hook, error, self._step)

    def assemble(self) -> StepRecord:
        """Return the record without what rules say of it."""
        return self._draft.assemble(self._step, self._tokens)


_HINT = "Please report this: what is in the trace is right, and it is not everything."


def lost_records(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return why a recording is not whole, None if it is or if the disk was what ended it."""
    if writer.failed:
        return None  # the trace says so itself, and the model was let go on
    if recorder.failure is not None:
        return TraceWriteError(recorder.failure.message, hint=_HINT)
    if recorder.refused:
        n, first = len(recorder.refused), recorder.refused[0]
        many = f"{n} records could not be stored, and of the first it is said: " if n > 1 else ""
        return TraceWriteError(f"The trace is not whole: {many}{first}", hint=_HINT)
    return None


def recording_error(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return what a user is to be told at the end: what was lost, or what ended the recording."""
    return lost_records(recorder, writer) or recorder.failure
