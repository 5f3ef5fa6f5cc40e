"""Records standalone calls: FlexAttention that a program calls outside of any model.

For a program that tries masks on tensors, as in most first experiments with FlexAttention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from flexinspect.records import step as records
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.rules.attention.kernel_failures import CALLS_ENDED_EVENT
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.attention import kernel_calls
from flexinspect_hooks.observers.attention.attention_hook import UNSEEN_LAYERS, AttentionHook
from flexinspect_hooks.observers.memory_hook import MemoryHook
from flexinspect_hooks.sessions.capture_session import CaptureSession

MAX_STANDALONE_CALLS = 500
"""The number of calls that are recorded; a program with more calls is not a small experiment."""


class StandaloneCalls(CaptureSession):
    """While entered, records the calls of `flex_attention` that no model's session records.

    Each call is a generation of one step, because it is not known which calls belong together; its
    number comes from `numbers`. A call that raised is a generation without a step. Keys before the
    newest rows count as cached, so that a call with one row is a decode step. Masks that were built
    and not followed by a call are a generation at the end, because building them may already have
    used too much memory.
    """

    def __init__(
        self, sink: TraceWriter, recorder: Recorder, numbers: Iterator[int], *, level: str
    ) -> None:
        self._attention = AttentionHook()
        self._placeholder_model = nn.Module()  # kept here: sessions reference their model weakly
        hooks = [self._attention, MemoryHook()]
        super().__init__(self._placeholder_model, sink, level=level, hooks=hooks, recorder=recorder)
        self.context.sees_kernels = self.context.is_standalone = True
        self.context.record_event = self._record_failed_call
        self.context.on_kernel = self._on_call
        self._numbers = numbers
        self.n_calls = 0

    @property
    def _kernels(self) -> kernel_calls.KernelCalls:
        assert self._attention.kernels is not None
        return self._attention.kernels

    def __exit__(self, *_: object) -> None:
        if kernel_calls.unassigned_builds:
            self._record_safely(self._record_builds, tuple(kernel_calls.unassigned_builds))
        ended = records.EventRecord(CALLS_ENDED_EVENT, "", time.time())
        self.recorder.run_rules(ended, self._rule_runner)
        super().__exit__()

    def _on_call(self, call: kernel_calls.KernelCall) -> None:
        """Record one call at once, or an event if that fails."""
        self._kernels.take_since(0)
        self.n_calls += 1
        if self.n_calls <= MAX_STANDALONE_CALLS:
            self._record_safely(self._record_call, call, time.perf_counter())
        else:
            self._kernels.take_builds()

    def _record_safely(self, record: Callable[..., None], *args: Any) -> None:
        try:
            record(*args)
        except Exception as error:
            text = f"A call outside of a model was not recorded: {type(error).__name__}: {error}"
            self._event("step-not-recorded", text)

    def _record_call(self, call: kernel_calls.KernelCall, returned: float) -> None:
        query, key = (call.arguments[name] for name in ("query", "key"))
        self._use_device(query.device)
        q_len, kv_len = (int(one.shape[-2]) for one in (query, key))
        step = self._make_step(q_len, kv_len, call.started, (returned - call.started) * 1e3)
        if self.n_calls == MAX_STANDALONE_CALLS:
            text = f"{self.n_calls} calls outside of a model are recorded; later ones are not."
            step.events.append((UNSEEN_LAYERS, text))
        self._record(step, f"{records.STANDALONE_CALLS}, {self.n_calls}", [call], returned)

    def _record_failed_call(self, kind: str, text: str, facts: Mapping[str, Any]) -> None:
        """Record a call that raised as a generation without a step, so that rules run on it."""
        if facts["kernel"] != kernel_calls.FLEX or self.n_calls >= MAX_STANDALONE_CALLS:
            self._event(kind, text, None, facts)
            return
        number, now = next(self._numbers), time.time()
        segments = self._begin(number, records.STANDALONE_RAISED, facts["kv_len"] or 0)
        self.recorder.put(records.EventRecord(kind, text, now, number, None, facts))
        end = records.GenerationEnd(number, "failed", "", segments, facts["error"], ended_at=now)
        self.recorder.put(end)

    def _begin(self, number: int, sample: str, n_keys: int) -> tuple[Segment, ...]:
        segments = (Segment(0, n_keys, "keys", SegmentKind.SHARED, 0),)
        record = records.GenerationRecord(
            generation=number,
            sample_id=sample,
            mask="not declared",
            positions="not known",
            segments=segments,
            tokens=(),
            started_at=time.time(),
        )
        self.recorder.begin_generation(record)
        self.recorder.begin_rules(record, self._rule_runner)
        return segments

    def _record_builds(self, builds: Sequence[records.BuildRecord]) -> None:
        now = time.perf_counter()
        wall_ms = sum(build.wall_ms for build in builds)
        step = self._make_step(builds[-1].q_len, builds[-1].kv_len, now, wall_ms)
        self._record(step, records.STANDALONE_MASKS, [], now)

    def _record(
        self, step: StepContext, sample: str, calls: list[kernel_calls.KernelCall], returned: float
    ) -> None:
        """Record a step as a generation of its own."""
        segments = self.context.segments = self._begin(step.generation, sample, step.kv_after)
        self._attention.begin(self.context)
        for hook in list(self._hooks):
            self._guard(hook, hook.open, step)
        self._kernels.done += calls
        self._queue_step(self._reduce(step), returned)
        self.total_s += step.wall_ms / 1e3 + step.capture_s
        end = records.GenerationEnd(step.generation, "finished", "", segments, ended_at=time.time())
        self.recorder.put(end)

    def _make_step(self, q_len: int, kv_len: int, started: float, wall_ms: float) -> StepContext:
        before, level = max(kv_len - q_len, 0), self.levels.level if self.levels else self.level
        phase, step = "decode" if before else "prefill", (next(self._numbers), 0)
        return StepContext(*step, phase, q_len, before, level, started=started, wall_ms=wall_ms)
