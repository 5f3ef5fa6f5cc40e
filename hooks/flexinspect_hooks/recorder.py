"""The writer thread: takes finished buffers, lets hooks turn them into records, commits them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flexinspect.errors import TraceWriteError
from flexinspect.findings import Finding
from flexinspect.records import (
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import Hook, StepDraft

QUEUE_LIMIT = 64
"""Steps that may wait for the disk; past it the model waits, and the wait counts as capture."""


class Sink(Protocol):
    """Where records go; `flexinspect.trace.writer.TraceWriter` is one."""

    def begin_generation(self, record: GenerationRecord) -> None: ...
    def write_step(self, record: StepRecord) -> None: ...
    def write_event(self, record: EventRecord) -> None: ...
    def end_generation(self, record: GenerationEnd) -> None: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step on its way to the writer thread. `kept` is what each hook's `reduce` returned."""

    context: StepContext
    buffer: StepBuffer
    kept: tuple[tuple[Hook, Any], ...]
    token: TokenRecord | None


Rule = Callable[[StepRecord], Sequence[Finding]]


class Recorder:
    """Owns the writer thread. A full disk stops the recording; it never stops the model."""

    def __init__(self, sink: Sink, *, rules: Sequence[Rule] = ()) -> None:
        self._sink = sink
        self._rules = rules
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name="flexinspect-writer", daemon=True)
        self.failure: TraceWriteError | None = None
        self.refused: list[str] = []
        self.writer_s = 0.0
        self.n_steps = 0
        self.on_hook_error: Callable[[Hook, BaseException, StepContext], None] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: FinishedStep | GenerationRecord | GenerationEnd | EventRecord) -> None:
        """Queue something to be written, in order."""
        if self._thread.is_alive():
            self._queue.put(item)

    def drain(self) -> None:
        """Wait until everything queued so far is written."""
        if self._thread.is_alive():
            self._queue.join()

    def stop(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                if self.failure is None:
                    self._write(item)
            except TraceWriteError as error:
                # A record that could not be stored is not the end of the recording.
                self.failure = error if getattr(self._sink, "failed", True) else None
                self.refused.append(error.message)
            finally:
                self.writer_s = time.thread_time()
                self._queue.task_done()

    def _write(self, item: Any) -> None:
        if isinstance(item, FinishedStep):
            self._write_step(item)
        elif isinstance(item, GenerationRecord):
            self._sink.begin_generation(item)
        elif isinstance(item, GenerationEnd):
            self._sink.end_generation(item)
        else:
            self._sink.write_event(item)

    def _write_step(self, item: FinishedStep) -> None:
        step, draft = item.context, StepDraft()
        values = item.buffer.values()
        for hook, kept in item.kept:
            try:
                hook.record(step, kept, values, draft)
            except Exception as error:
                if self.on_hook_error is not None:
                    self.on_hook_error(hook, error, step)
        record = _assemble(item, draft)
        found = tuple(finding for rule in self._rules for finding in rule(record))
        self._sink.write_step(replace(record, findings=found) if found else record)
        self.n_steps += 1


def _assemble(item: FinishedStep, draft: StepDraft) -> StepRecord:
    step = item.context
    noted = [
        EventRecord(kind, text, step.started_at, step.generation, step.step)
        for kind, text in step.events
    ]
    return StepRecord(
        generation=step.generation,
        step=step.step,
        phase=step.phase,
        q_len=step.q_len,
        kv_before=step.kv_before,
        kv_after=step.kv_after,
        started_at=step.started_at,
        wall_ms=step.wall_ms,
        capture_ms=step.capture_s * 1e3,
        logits=draft.logits,
        tokens=(item.token,) if item.token is not None else (),
        calls=tuple(draft.calls),
        layer_stats=tuple(draft.layer_stats),
        memory=draft.memory,
        masks=tuple(draft.masks),
        arrays=tuple(draft.arrays),
        events=(*noted, *draft.events),
    )
