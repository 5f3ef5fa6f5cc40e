"""FlexAttention called by a program itself, outside of any model: each call stands alone.

For a program that tries masks out on tensors, as most questions about FlexAttention begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    STANDALONE_CALLS,
    STANDALONE_MASKS,
    STANDALONE_RAISED,
    BuildRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
)
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Remove
from flexinspect_hooks.capture.recorder import FinishedStep, Recorder, Sink
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.attention.attention_hook import UNSEEN_LAYERS, AttentionHook
from flexinspect_hooks.observers.attention.kernel_calls import (
    KernelCalls,
    KernelReturn,
    PendingCall,
    is_forward_running,
)
from flexinspect_hooks.observers.attention.kernel_interception import BUILD, FLEX
from flexinspect_hooks.observers.memory_hook import MemoryHook
from flexinspect_hooks.sessions.capture_session import CaptureSession, check_level

MAX_STANDALONE_CALLS = 500
"""Calls that are recorded; a program that makes more is no trial any more."""


OnKernelReturn = Callable[[KernelReturn, float], None]
"""Takes a call and when it began, in the clock of `time.perf_counter`."""


class _StandaloneKernelCalls(KernelCalls):
    """Takes what is left of kernel calls when the sessions of models have had theirs."""

    def __init__(self, context: CaptureContext, on_return: OnKernelReturn) -> None:
        super().__init__(context)
        self._on_return = on_return

    def accepts(self, name: str) -> bool:
        """Want FlexAttention, and the masks built for it, but nothing of an open step."""
        return name in (FLEX, BUILD) and not is_forward_running()

    def after(self, note: PendingCall, output: Any) -> None:
        """Hand the call over at once."""
        super().after(note, output)
        for call in self.take_since(0):
            self._on_return(call, note.started)

    def failed(self, note: PendingCall, error: BaseException) -> None:
        """Say so; the masks that were built for a call that failed are no other call's."""
        super().failed(note, error)
        self.take_builds()


class StandaloneAttention(AttentionHook):
    """Describes the calls that are put before it; installs nothing but their observer."""

    is_standalone = True

    def __init__(self, on_return: OnKernelReturn) -> None:
        self._on_return = on_return

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Observe the kernels."""
        self.prepare(context)
        self.calls = self._kernels = _StandaloneKernelCalls(context, self._on_return)
        return [self.calls.observe()]


class StandaloneCalls(CaptureSession):
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
        self._attention = StandaloneAttention(self._on_call)
        self._placeholder_model = nn.Module()  # sessions hold their model loosely
        super().__init__(
            self._placeholder_model,
            sink,
            level=level,
            hooks=[self._attention, MemoryHook()],
            are_standalone=True,
            recorder=recorder,
        )
        self.context.record_event = self._record_failed_call
        self._numbers = numbers
        self.n_calls = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if builds := self._attention.calls.unassigned_builds():
            self._record_safely(lambda: self._record_builds(builds))
        super().__exit__(kind, error, trace)

    def switch(self, *, level: str | None = None, layers: Sequence[int] | None = None) -> None:
        """Record at another level from the next call on; there are no layers to choose."""
        self.level = check_level(level) if level else self.level

    def _on_call(self, call: KernelReturn, started: float) -> None:
        """Record one call, or why it could not be."""
        self.n_calls += 1
        if self.n_calls > MAX_STANDALONE_CALLS:
            self._attention.calls.take_builds()
            return
        self._record_safely(lambda: self._record_call(call, started, time.perf_counter()))

    def _record_safely(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._event("step-unread", f"A call outside of a model was not recorded: {what}")

    def _record_call(self, call: KernelReturn, started: float, returned: float) -> None:
        q_len, kv_len = (int(call.call.arguments[name].shape[-2]) for name in ("query", "key"))
        step = self._make_step(q_len, kv_len, started)
        step.wall_ms = (returned - started) * 1e3
        if self.n_calls == MAX_STANDALONE_CALLS:
            text = (
                f"{MAX_STANDALONE_CALLS} calls outside of a model are recorded; later ones are not."
            )
            step.events.append((UNSEEN_LAYERS, text))
        self._record(step, f"{STANDALONE_CALLS}, {self.n_calls}", [call], returned)

    def _record_failed_call(self, kind: str, text: str, facts: Mapping[str, Any]) -> None:
        """Tell of a call that raised in a generation of its own, without any step.

        So that rules hear it, and that what they say has a place.
        """
        if facts["kernel"] != FLEX or self.n_calls >= MAX_STANDALONE_CALLS:
            self._event(kind, text, None, facts)
            return
        number, now = next(self._numbers), time.time()
        segments = (Segment(0, facts["kv_len"] or 0, "keys", SegmentKind.SHARED, 0),)
        about = (STANDALONE_RAISED, "not declared", "not known", segments, ())
        self.recorder.begin_generation(
            GenerationRecord(number, *about, started_at=now), self._rule_runner
        )
        self.recorder.put(EventRecord(kind, text, now, number, None, facts))
        end = GenerationEnd(number, "failed", "", segments, facts["error"], ended_at=now)
        self.recorder.put(end)

    def _record_builds(self, builds: Sequence[BuildRecord]) -> None:
        now = time.perf_counter()
        step = self._make_step(builds[-1].q_len, builds[-1].kv_len, now)
        step.wall_ms = sum(build.wall_ms for build in builds)
        self._record(step, STANDALONE_MASKS, [], now)

    def _record(
        self, step: StepContext, sample: str, calls: list[KernelReturn], returned: float
    ) -> None:
        """Record a step as a generation of its own."""
        segments = (Segment(0, step.kv_after, "keys", SegmentKind.SHARED, 0),)
        about = (sample, "not declared", "not known", segments, ())
        self.context.segments = segments
        self._attention.begin(self.context)
        record = GenerationRecord(step.generation, *about, started_at=time.time())
        self.recorder.begin_generation(record, self._rule_runner)
        self._record_step(step, calls, returned)
        end = GenerationEnd(step.generation, "finished", "", segments, ended_at=time.time())
        self.recorder.put(end)

    def _record_step(self, step: StepContext, calls: list[KernelReturn], returned: float) -> None:
        for hook in list(self._hooks):
            self._guard(hook, hook.open, step)
        self._attention.calls.done += calls
        buffer = StepBuffer(self._device, self._stream)
        kept = self._start_copy(step, buffer, self._reduce(step, buffer))
        step.capture_s = time.perf_counter() - returned
        self.recorder.put(FinishedStep(step, buffer, tuple(kept)))
        self.capture_s += step.capture_s
        self.total_s += step.wall_ms / 1e3 + step.capture_s

    def _make_step(self, q_len: int, kv_len: int, started: float) -> StepContext:
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
