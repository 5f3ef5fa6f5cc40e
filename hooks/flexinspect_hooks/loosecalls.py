"""FlexAttention called by a program itself, outside of any model: each call stands alone.

For a program that tries masks out on tensors, as most questions about FlexAttention begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import (
    LOOSE_CALLS,
    LOOSE_MASKS,
    LOOSE_RAISED,
    BuildRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
)
from flexinspect_hooks.attention import UNSEEN, AttentionHook
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove
from flexinspect_hooks.kernelcalls import Done, KernelCalls, Note, is_any_open
from flexinspect_hooks.kernels import BUILD, FLEX
from flexinspect_hooks.memory import MemoryHook
from flexinspect_hooks.recorder import FinishedStep, Recorder, Sink
from flexinspect_hooks.session import CaptureSession, check_level

LIMIT = 500
"""Calls that are recorded; a program that makes more is no trial any more."""


Take = Callable[[Done, float], None]
"""Takes a call and when it began, in the clock of `time.perf_counter`."""


class _Calls(KernelCalls):
    """Takes what is left of kernel calls when the sessions of models have had theirs."""

    def __init__(self, context: CaptureContext, take: Take) -> None:
        super().__init__(context)
        self._take = take

    def wants(self, name: str) -> bool:
        """Want FlexAttention, and the masks built for it, but nothing of an open step."""
        return name in (FLEX, BUILD) and not is_any_open()

    def after(self, note: Note, output: Any) -> None:
        """Hand the call over at once."""
        super().after(note, output)
        for call in self.since(0):
            self._take(call, note.started)

    def failed(self, note: Note, error: BaseException) -> None:
        """Say so; the masks that were built for a call that failed are no other call's."""
        super().failed(note, error)
        self.take_builds()


class LooseAttention(AttentionHook):
    """Describes the calls that are put before it; installs nothing but their observer."""

    are_loose = True

    def __init__(self, take: Take) -> None:
        self._take = take

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Observe the kernels."""
        self.prepare(context)
        self.calls = self._kernels = _Calls(context, self._take)
        return [self.calls.observe()]


class LooseCalls(CaptureSession):
    """While entered, records the calls of `flex_attention` that no model's session takes.

    Each is a generation of one step, as nothing says that two calls belong together; its number
    comes from `numbers`; one that raised is a generation without a step. Keys before the newest
    rows count as cached, so that a call of one row is a decode step. Masks that were built and
    that no call came after are a generation at the end: building them may have been too much
    already.
    """

    def __init__(
        self, sink: Sink, recorder: Recorder, numbers: Iterator[int], *, level: str
    ) -> None:
        self._attention = LooseAttention(self._take)
        self._root = nn.Module()  # sessions hold their model loosely
        super().__init__(
            self._root,
            sink,
            level=level,
            hooks=[self._attention, MemoryHook()],
            are_loose=True,
            recorder=recorder,
        )
        self.context.tell = self._tell_failed
        self._numbers = numbers
        self.n_calls = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if builds := self._attention.calls.unclaimed():
            self._try(lambda: self._record_builds(builds))
        super().__exit__(kind, error, trace)

    def switch(self, *, level: str | None = None, layers: Sequence[int] | None = None) -> None:
        """Record at another level from the next call on; there are no layers to choose."""
        self.level = check_level(level) if level else self.level

    def _take(self, call: Done, started: float) -> None:
        """Record one call, or why it could not be."""
        self.n_calls += 1
        if self.n_calls > LIMIT:
            self._attention.calls.take_builds()
            return
        self._try(lambda: self._record_call(call, started, time.perf_counter()))

    def _try(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._event("step-unread", f"A call outside of a model was not recorded: {what}")

    def _record_call(self, call: Done, started: float, returned: float) -> None:
        q_len, kv_len = (int(call.call.given[name].shape[-2]) for name in ("query", "key"))
        step = self._step_of(q_len, kv_len, started)
        step.wall_ms = (returned - started) * 1e3
        if self.n_calls == LIMIT:
            text = f"{LIMIT} calls outside of a model are recorded; later ones are not."
            step.events.append((UNSEEN, text))
        self._record(step, f"{LOOSE_CALLS}, {self.n_calls}", [call], returned)

    def _tell_failed(self, kind: str, text: str, facts: Mapping[str, Any]) -> None:
        """Tell of a call that raised in a generation of its own, without any step.

        So that rules hear it, and that what they say has a place.
        """
        if facts["kernel"] != FLEX or self.n_calls >= LIMIT:
            self._event(kind, text, None, facts)
            return
        number, now = next(self._numbers), time.time()
        segments = (Segment(0, facts["kv_len"] or 0, "keys", SegmentKind.SHARED, 0),)
        about = (LOOSE_RAISED, "not declared", "not known", segments, ())
        self.recorder.begin(GenerationRecord(number, *about, started_at=now), self._book)
        self.recorder.put(EventRecord(kind, text, now, number, None, facts))
        end = GenerationEnd(number, "failed", "", segments, facts["error"], ended_at=now)
        self.recorder.put(end)

    def _record_builds(self, builds: Sequence[BuildRecord]) -> None:
        now = time.perf_counter()
        step = self._step_of(builds[-1].q_len, builds[-1].kv_len, now)
        step.wall_ms = sum(build.wall_ms for build in builds)
        self._record(step, LOOSE_MASKS, [], now)

    def _record(self, step: StepContext, sample: str, calls: list[Done], returned: float) -> None:
        """Record a step as a generation of its own."""
        segments = (Segment(0, step.kv_after, "keys", SegmentKind.SHARED, 0),)
        about = (sample, "not declared", "not known", segments, ())
        self.context.segments = segments
        self._attention.begin(self.context)
        record = GenerationRecord(step.generation, *about, started_at=time.time())
        self.recorder.begin(record, self._book)
        self._record_step(step, calls, returned)
        end = GenerationEnd(step.generation, "finished", "", segments, ended_at=time.time())
        self.recorder.put(end)

    def _record_step(self, step: StepContext, calls: list[Done], returned: float) -> None:
        for hook in list(self._hooks):
            self._guard(hook, hook.open, step)
        self._attention.calls.done += calls
        buffer = StepBuffer(self._device, self._stream)
        kept = self._ship(step, buffer, self._reduce(step, buffer))
        step.capture_s = time.perf_counter() - returned
        self.recorder.put(FinishedStep(step, buffer, tuple(kept)))
        self.capture_s += step.capture_s
        self.total_s += step.wall_ms / 1e3 + step.capture_s

    def _step_of(self, q_len: int, kv_len: int, started: float) -> StepContext:
        before = max(kv_len - q_len, 0)
        return StepContext(
            generation=next(self._numbers),
            step=0,
            phase="decode" if before else "prefill",
            q_len=q_len,
            kv_before=before,
            level=self.level,
            started_at=time.time(),
            started=started,
        )
