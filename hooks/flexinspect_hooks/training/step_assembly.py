"""Collects the data of an optimizer step, and makes its record."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.records.step import GenerationRecord, LayerStatRecord, MemoryRecord
from flexinspect.records.training_step import (
    LOSS_FROM_OUTPUT,
    LOSS_REPORTED,
    AnomalyOrigin,
    TrainingStepRecord,
)
from flexinspect_hooks.capture.buffer import Values
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.memory_hook import rss_reader
from flexinspect_hooks.training.forward_passes import StepPasses
from flexinspect_hooks.training.measurement import GradientMeter, StepGradients
from flexinspect_hooks.training.parameters import placement_of
from flexinspect_hooks.training.tensor_statistics import is_remote

Loss = float | Tensor

TRAINING_SAMPLE_ID = "training"
"""The `sample_id` of the generation that represents a training run."""


def training_generation(meter: GradientMeter, optimizer: Optimizer | None) -> GenerationRecord:
    """The generation record that represents a training run at its start."""
    facts = {
        "groups": list(meter.groups),
        "parameters": len(meter.named),
        "values": sum(one.parameter.numel() for one in meter.named),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "placement": placement_of(meter.model),
    }
    return GenerationRecord(
        generation=0,
        sample_id=TRAINING_SAMPLE_ID,
        mask="",
        positions="",
        segments=(),
        tokens=(),
        declared={"training": facts},
        started_at=time.time(),
    )


@dataclass(slots=True)
class TrainingStepDraft:
    """The data of one step until it is complete.

    `reported_loss` is the loss that the program passed to `TrainingWatch.step`.
    """

    number: int
    started: float
    started_at: float
    passes: StepPasses = field(default_factory=StepPasses)
    measured: StepGradients | None = None
    rates: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    norm_before_clip: Loss | None = None
    max_norm: float | None = None
    scale: float | None = None
    is_skipped: bool = False
    optimizer_started: float | None = None
    optimizer_s: float = 0.0
    data_s: float | None = None
    waited_s: float = 0.0
    own_s: float = 0.0
    wall_s: float = 0.0
    detail: str = ""
    reported_loss: Loss | None = None
    memory: MemoryRecord | None = None
    notes: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def context(self) -> StepContext:
        """The step's context for the writer thread."""
        context = StepContext(0, self.number, "train", 0, 0, "", self.started_at, self.started)
        context.wall_ms, context.capture_s = self.wall_s * 1e3, self.own_s
        context.events += self.notes
        return context

    def read(self, passes: StepPasses) -> None:
        """Convert results on a device to numbers, which waits for the device."""
        passes.resolve()
        for values in (passes.losses, passes.output_gradient_norms):
            values.extend([float(values.popleft()) for _ in range(len(values))])
        self.reported_loss = None if self.reported_loss is None else float(self.reported_loss)
        self.norm_before_clip = (
            None if self.norm_before_clip is None else float(self.norm_before_clip)
        )

    def needs_wait(self) -> bool:
        """Whether `read` would wait for a device."""
        values = (
            self.reported_loss,
            self.norm_before_clip,
            *self.passes.losses,
            *self.passes.output_gradient_norms,
            *(one.values for one in self.passes.extremes),
        )
        return self.passes.pending is not None or any(
            isinstance(value, Tensor) and is_remote(value) for value in values
        )

    def record(self) -> TrainingStepRecord:
        """The record of the step from everything that is known."""
        self.passes.is_updated = True  # results not read yet are read after the optimizer's step
        self.read(self.passes)
        loss, source = self._loss()
        passes, measured = self.passes, self.measured
        spent = passes.forward_s + passes.backward_s + self.optimizer_s
        spent += (self.data_s or 0.0) + self.own_s + self.waited_s
        return TrainingStepRecord(
            loss=loss,
            loss_source=source,
            learning_rates=self.rates,
            total_norm=None if measured is None else measured.total,
            norm_before_clip=None
            if self.norm_before_clip is None
            else float(self.norm_before_clip),
            max_norm=self.max_norm,
            n_parameters=0 if measured is None else measured.n_parameters,
            n_exploding=0 if measured is None else measured.n_exploding,
            n_vanishing=0 if measured is None else measured.n_vanishing,
            n_dead=0 if measured is None else measured.n_dead,
            n_sick=0 if measured is None else measured.n_sick,
            group_norms=() if measured is None else measured.group_norms,
            group_ratios=self.ratios,
            gradients=() if measured is None else measured.rows,
            producer=self._producer(loss, source),
            n_backward=passes.n_backward,
            forward_ms=passes.forward_s * 1e3,
            backward_ms=passes.backward_s * 1e3,
            optimizer_ms=self.optimizer_s * 1e3,
            data_ms=None if self.data_s is None else self.data_s * 1e3,
            other_ms=max(self.wall_s - spent, 0.0) * 1e3,
            scale=self.scale,
            is_skipped=self.is_skipped,
            device=passes.device,
            autocast=passes.autocast,
            detail=self.detail,
        )

    def _loss(self) -> tuple[float, str]:
        if self.reported_loss is not None:
            return float(self.reported_loss), LOSS_REPORTED
        if self.passes.losses:
            losses = [*map(float, self.passes.losses)]
            loss = math.fsum(losses) if self.passes.are_shares else fmean(losses)
            return loss, LOSS_FROM_OUTPUT
        return math.nan, ""

    def _producer(self, loss: float, source: str) -> AnomalyOrigin | None:
        """Where the anomaly began: in the forward pass, else in the loss, else in the backward."""
        origin = None if self.measured is None else self.measured.producer
        if self.passes.producer is not None:
            return self.passes.producer
        if source and not math.isfinite(loss):
            return AnomalyOrigin("loss", "", 0 if origin is None else origin.n_carriers + 1)
        if origin is None or origin.kind != "backward":
            return origin
        output_norms = [float(norm) for norm in self.passes.output_gradient_norms]
        if all(map(math.isfinite, output_norms)):
            return origin
        detail = f"{origin.detail}; it arrives at the model's output, so the loss makes it"
        return AnomalyOrigin(origin.kind, origin.name, origin.n_carriers, detail)


@dataclass(frozen=True, slots=True)
class FinishedTrainingStep:
    """The data of one step for the writer thread."""

    training: TrainingStepRecord
    memory: MemoryRecord | None
    stats: Sequence[LayerStatRecord]


class TrainingRecords:
    """The hook that adds the records of a finished step to the draft of the writer thread."""

    name = "training"

    def record(
        self, step: StepContext, kept: FinishedTrainingStep, values: Values, draft: StepDraft
    ) -> None:
        """Add the step's records to the draft."""
        draft.training, draft.memory = kept.training, kept.memory
        draft.layer_stats += kept.stats


def timed_synchronize(device: torch.device) -> float:
    """Wait until a GPU has finished its work; returns the seconds, 0 for other devices."""
    if device.type != "cuda":
        return 0.0
    started = time.perf_counter()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


class StepMemory:
    """Reads the memory of the process and of its GPU, without synchronisation."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        self._device = device
        self._rss, self.close = rss_reader()

    def read(self) -> MemoryRecord:
        """The memory now; the peak is the allocator's, which only the program resets."""
        if self._device.type != "cuda":
            return MemoryRecord(self._rss(), self._model, 0)
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        sizes = (allocated["current"], reserved["current"], allocated["peak"])
        return MemoryRecord(self._rss(), self._model, 0, *sizes)
