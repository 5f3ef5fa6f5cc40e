"""Collects the data of an optimizer step, and makes its record."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.records.step import GenerationRecord, MemoryRecord
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
from flexinspect_hooks.training.measurement import GradientMeter
from flexinspect_hooks.training.tensor_statistics import is_remote

Loss = float | Tensor

TRAINING_SAMPLE_ID = "training"
"""The `sample_id` of the generation that represents a training run."""


def training_generation(meter: GradientMeter, optimizer: Optimizer | None) -> GenerationRecord:
    """The generation record that represents a training run at its start."""
    placement: Counter[str] = Counter()
    for one in meter.model.parameters():
        placement[str(one.device)] += one.numel()
    facts = {
        "groups": list(meter.groups),
        "parameters": len(meter.named),
        "values": sum(one.parameter.numel() for one in meter.named),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "placement": dict(placement),
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
class TrainingStepDraft(StepPasses):
    """The data of one step until it is complete.

    `reported_loss` is the loss that the program passed to `TrainingWatch.step`.
    """

    number: int = 0
    started: float = 0.0
    started_at: float = 0.0
    measured: TrainingStepRecord | None = None
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

    def read(self) -> None:
        """Convert results on a device to numbers, which waits for the device."""
        self.resolve()
        for values in (self.losses, self.output_gradient_norms):
            values.extend([float(values.popleft()) for _ in range(len(values))])
        loss, norm = self.reported_loss, self.norm_before_clip
        self.reported_loss = None if loss is None else float(loss)
        self.norm_before_clip = None if norm is None else float(norm)

    def needs_wait(self) -> bool:
        """Whether `read` would wait for a device."""
        values = [self.reported_loss, self.norm_before_clip, *self.losses]
        values += [*self.output_gradient_norms, *(one.values for one in self.extremes)]
        return self.pending is not None or any(
            isinstance(value, Tensor) and is_remote(value) for value in values
        )

    def record(self) -> TrainingStepRecord:
        """The record of the step from everything that is known."""
        self.is_updated = True  # results not read yet are read after the optimizer's step
        self.read()
        loss, source = self._loss()
        spent = self.forward_s + self.backward_s + self.optimizer_s
        spent += (self.data_s or 0.0) + self.own_s + self.waited_s
        return replace(
            self.measured or TrainingStepRecord(loss, source, ()),
            loss=loss,
            loss_source=source,
            learning_rates=self.rates,
            norm_before_clip=cast(float | None, self.norm_before_clip),
            max_norm=self.max_norm,
            group_ratios=self.ratios,
            anomaly_origin=self._producer(loss, source),
            n_backward=self.n_backward,
            forward_ms=self.forward_s * 1e3,
            backward_ms=self.backward_s * 1e3,
            optimizer_ms=self.optimizer_s * 1e3,
            data_ms=None if self.data_s is None else self.data_s * 1e3,
            other_ms=max(self.wall_s - spent, 0.0) * 1e3,
            scale=self.scale,
            is_skipped=self.is_skipped,
            device=self.device,
            autocast=self.autocast,
            detail=self.detail,
        )

    def _loss(self) -> tuple[float, str]:
        if self.reported_loss is not None:
            return float(self.reported_loss), LOSS_REPORTED
        if self.losses:
            losses = [*map(float, self.losses)]
            loss = math.fsum(losses) if self.are_shares else fmean(losses)
            return loss, LOSS_FROM_OUTPUT
        return math.nan, ""

    def _producer(self, loss: float, source: str) -> AnomalyOrigin | None:
        """Where the anomaly began: in the forward pass, else in the loss, else in the backward."""
        origin = None if self.measured is None else self.measured.anomaly_origin
        if self.producer is not None:
            return self.producer
        if source and not math.isfinite(loss):
            return AnomalyOrigin("loss", "", 0 if origin is None else origin.n_affected + 1)
        if origin is None or origin.kind != "backward":
            return origin
        output_norms = [float(norm) for norm in self.output_gradient_norms]
        if all(map(math.isfinite, output_norms)):
            return origin
        detail = f"{origin.detail}; it arrives at the model's output, so the loss makes it"
        return AnomalyOrigin(origin.kind, origin.name, origin.n_affected, detail)


class TrainingRecords:
    """The hook that adds a finished step to the draft of the writer thread."""

    name = "training"

    def record(
        self,
        step: StepContext,
        kept: tuple[TrainingStepRecord, TrainingStepDraft],
        values: Values,
        draft: StepDraft,
    ) -> None:
        """Add the step's record, its memory and the statistics of its outputs."""
        draft.training, finished = kept
        draft.memory = finished.memory
        draft.layer_stats += finished.stats


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
