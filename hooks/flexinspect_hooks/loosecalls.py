"""FlexAttention called by a program itself, outside of any model: each call is a step of its own.

For a program that tries masks out on tensors, as most questions about FlexAttention begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

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

LIMIT = 2000
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

    They make one generation, which begins with the first of them; its number comes from `numbers`.
    A call's keys before its rows count as cached, so that a call of one row is a decode step.
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
        self._number: int | None = None
        self._n_calls = 0

    def finish(self, state: str) -> None:
        """End the generation, if there was a call."""
        if self._number is not None:
            number, self._number = self._number, None
            self.end_generation(GenerationEnd(number, state, "", (), ended_at=time.time()))

    def _take(self, call: Done, started: float) -> None:
        """Record one call as a step."""
        if self._n_calls >= LIMIT:
            return
        if self._number is None:
            self._number = next(self._numbers)
            record = GenerationRecord(self._number, SAMPLE, "not declared", "not known", (), ())
            self.begin_generation(record)
        step = self._step_of(call, started)
        self._n_calls += 1
        if self._n_calls == LIMIT:
            text = f"{LIMIT} calls outside of a model are recorded; later ones are not."
            step.events.append((UNSEEN, text))
        self._record(step, call)

    def _step_of(self, call: Done, started: float) -> StepContext:
        query, key = call.call.given["query"], call.call.given["key"]
        q_len, kv_len = int(query.shape[-2]), int(key.shape[-2])
        before = max(kv_len - q_len, 0)
        return StepContext(
            generation=self._number or 0,
            step=self._n_calls,
            phase="decode" if before else "prefill",
            q_len=q_len,
            kv_before=before,
            level=self.level,
            started_at=time.time(),
            started=started,
        )

    def _record(self, step: StepContext, call: Done) -> None:
        returned = time.perf_counter()
        step.wall_ms = (returned - step.started) * 1e3
        for hook in list(self._hooks):
            self._guard(hook, hook.open, step)
        self._attention.calls.done.append(call)
        buffer = StepBuffer(self._device, self._stream)
        kept = self._ship(step, buffer, self._reduce(step, buffer))
        step.capture_s = time.perf_counter() - returned
        self.recorder.put(FinishedStep(step, buffer, tuple(kept)))
        self.capture_s += step.capture_s
        self.total_s += step.wall_ms / 1e3 + step.capture_s
