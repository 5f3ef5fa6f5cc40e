"""The draft of a step's records, and the protocol of the objects that fill it in.

The modules of this package work on numpy arrays and plain data. They never import torch, and hold
no reference to the model or to its hooks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from flexinspect.records import step as step_records
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.step_writer.values import (
    ACTIVATION_PREFIX,
    BFLOAT16,
    Values,
    with_prefix,
)

StepEvent = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""An event of a step: its kind, its text, and optional facts."""


class StepFacts(Struct):
    """The plain facts of a step: its place, its lengths, its token, its time."""

    generation: int
    step: int
    phase: str
    q_len: int
    kv_before: int
    level: str
    started_at: float = field(default_factory=time.time)
    branch: int = 0
    token_id: int | None = None
    processors: tuple[str, ...] = ()
    """The names of the logits processors whose scores are kept."""
    is_scored: bool = True
    """Whether the token was chosen from `scores` (from the logits if `scores` is None)."""
    wall_ms: float = 0.0
    capture_s: float = 0.0
    events: list[StepEvent] = field(default_factory=list)

    @property
    def kv_after(self) -> int:
        """Keys in the cache once this step's rows are added."""
        return self.kv_before + self.q_len


class StepDraft(Struct):
    """The records of a step while the hooks fill them in."""

    context: StepFacts
    logits: step_records.LogitsRecord | None = None
    memory: step_records.MemoryRecord | None = None
    training: TrainingStepRecord | None = None
    inputs: step_records.InputsRecord | None = None
    tokens: tuple[step_records.TokenRecord, ...] = ()
    calls: list[step_records.CallRecord] = field(default_factory=list)
    builds: list[step_records.BuildRecord] = field(default_factory=list)
    gpus: list[step_records.GpuRecord] = field(default_factory=list)
    lens: list[step_records.LensRecord] = field(default_factory=list)
    layer_stats: list[step_records.LayerStatRecord] = field(default_factory=list)
    masks: list[step_records.MaskRecord] = field(default_factory=list)
    arrays: list[step_records.ArrayRecord] = field(default_factory=list)
    events: list[step_records.EventRecord] = field(default_factory=list)
    are_values_lost: bool = False
    """Set by `StepRecords.record` if its values come from tensors that were modified before."""

    def add_event(self, kind: str, text: str, data: Mapping[str, Any]) -> None:
        """Add an event of the step."""
        place = (self.context.started_at, self.context.generation, self.context.step)
        self.events.append(step_records.EventRecord(kind, text, *place, data))

    def add_activations(self, values: Values, streams: Sequence[str]) -> None:
        """Add the stored tensors of these streams, stream by stream."""
        records = []
        for name, array in with_prefix(values, ACTIVATION_PREFIX).items():
            dtype = "bfloat16" if name.startswith(BFLOAT16) else None
            stream, _, layers = name.removeprefix(BFLOAT16).rpartition(".")
            if stream in streams:
                numbers = map(int, layers.split(","))
                records += [
                    step_records.ArrayRecord(stream, part, layer, dtype)
                    for layer, part in zip(numbers, array, strict=True)
                ]
        self.arrays += sorted(records, key=lambda record: streams.index(record.stream))

    def assemble(self) -> step_records.StepRecord:
        """Return the record of the step. Events of the forward come before those of the hooks."""
        step = self.context
        place = (step.started_at, step.generation, step.step)
        self.events[:0] = [
            step_records.EventRecord(kind, text, *place, *data) for kind, text, *data in step.events
        ]
        drafted = {name: getattr(self, name) for name in self.__struct_fields__[1:-1]}
        lists = {name: tuple(part) for name, part in drafted.items() if isinstance(part, list)}
        own = {name: getattr(step, name) for name in _STEP_FIELDS}
        return step_records.StepRecord(**own, **(drafted | lists), capture_ms=step.capture_s * 1e3)


_STEP_FIELDS = (
    *("generation", "step", "branch", "phase"),
    *("q_len", "kv_before", "kv_after", "started_at", "wall_ms"),
)
"""Fields that a `StepRecord` takes from its `StepContext`."""


class StepRecords(Protocol):
    """Makes the records of one hook's values; it may keep state from step to step."""

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        """Add the records of a step to its draft; `kept` is what the hook's `reduce` returned."""
