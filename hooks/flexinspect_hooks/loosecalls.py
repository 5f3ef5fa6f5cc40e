"""FlexAttention called by a program itself, outside of any model: each call stands alone.

For a program that tries masks out on tensors, as most questions about FlexAttention begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import GenerationEnd, GenerationRecord
from flexinspect_hooks.attention import UNSEEN, AttentionHook
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove
from flexinspect_hooks.kernelcalls import Done, KernelCalls, Note
from flexinspect_hooks.kernels import BUILD, FLEX, KernelCall, observe_kernels
from flexinspect_hooks.memory import MemoryHook
from flexinspect_hooks.recorder import FinishedStep, Recorder, Sink
from flexinspect_hooks.session import CaptureSession

LIMIT = 500
"""Calls that are recorded; a program that makes more is no trial any more."""

SAMPLE = "calls outside of a model"


Take = Callable[[Done, float], None]
"""Takes a call and when it began, in the clock of `time.perf_counter`."""


class _Calls(KernelCalls):
    """Takes what is left of kernel calls when the sessions of models have had theirs."""

    def __init__(self, context: CaptureContext, take: Take) -> None:
        super().__init__(context)
        self._take = take

    def before(self, call: KernelCall) -> Note | None:
        """Take FlexAttention, and the masks built for it."""
        return self.note(call) if call.name in (FLEX, BUILD) else None

    def after(self, note: Note, output: Any) -> None:
        """Hand the call over at once."""
        super().after(note, output)
        for call in self.since(0):
            self._take(call, note.started)


class LooseAttention(AttentionHook):
    """Describes the calls that are put before it; installs nothing but their observer."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Observe the kernels."""
        self.prepare(context)
        self.calls = self._kernels = _Calls(context, self._take)
        return [observe_kernels(self.calls)]


class LooseCalls(CaptureSession):
    """While entered, records the calls of `flex_attention` that no model's session takes.

    Each is a generation of one step, as nothing says that two calls belong together; its number
    comes from `numbers`. Keys before the newest rows count as cached, so that a call of one row is
    a decode step.
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
            rules=(),
            recorder=recorder,
        )
        self._numbers = numbers
        self.n_calls = 0

    def _take(self, call: Done, started: float) -> None:
        """Record one call, or why it could not be."""
        self.n_calls += 1
        if self.n_calls > LIMIT:
            return
        try:
            self._record_call(call, started, time.perf_counter())
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._event("step-unread", f"A call outside of a model was not recorded: {what}")

    def _record_call(self, call: Done, started: float, returned: float) -> None:
        number = next(self._numbers)
        step = _step_of(call, number, started, self.level)
        step.wall_ms = (returned - started) * 1e3
        segments = (Segment(0, step.kv_after, "keys", SegmentKind.SHARED, 0),)
        about = (f"{SAMPLE}, {self.n_calls}", "not declared", "not known", segments, ())
        self.context.segments = segments
        self._attention.begin(self.context)
        self.recorder.begin(GenerationRecord(number, *about, started_at=time.time()), self._book)
        self._record(step, call, returned)
        end = GenerationEnd(number, "finished", "", segments, ended_at=time.time())
        self.recorder.put(end)

    def _record(self, step: StepContext, call: Done, returned: float) -> None:
        if self.n_calls == LIMIT:
            text = f"{LIMIT} calls outside of a model are recorded; later ones are not."
            step.events.append((UNSEEN, text))
        for hook in list(self._hooks):
            self._guard(hook, hook.open, step)
        self._attention.calls.done.append(call)
        buffer = StepBuffer(self._device, self._stream)
        kept = self._ship(step, buffer, self._reduce(step, buffer))
        step.capture_s = time.perf_counter() - returned
        self.recorder.put(FinishedStep(step, buffer, tuple(kept)))
        self.capture_s += step.capture_s
        self.total_s += step.wall_ms / 1e3 + step.capture_s


def _step_of(call: Done, generation: int, started: float, level: str) -> StepContext:
    query, key = call.call.given["query"], call.call.given["key"]
    q_len, kv_len = int(query.shape[-2]), int(key.shape[-2])
    before = max(kv_len - q_len, 0)
    return StepContext(
        generation=generation,
        step=0,
        phase="decode" if before else "prefill",
        q_len=q_len,
        kv_before=before,
        level=level,
        started_at=time.time(),
        started=started,
    )
