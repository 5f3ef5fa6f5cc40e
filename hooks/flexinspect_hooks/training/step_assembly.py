"""What is gathered of an optimizer step until it is whole, and how a record is made of it."""

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
"""The `sample_id` of the generation that a training run is."""


def training_generation(meter: GradientMeter, optimizer: Optimizer | None) -> GenerationRecord:
    """Return the generation that a training run is, as it begins."""
    about = {
        "groups": list(meter.groups),
        "parameters": len(meter.named),
        "values": sum(one.parameter.numel() for one in meter.named),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "placement": placement_of(meter.model),
    }
    return GenerationRecord(
        *(0, TRAINING_SAMPLE_ID, "", "", (), ()),
        declared={"training": about},
        started_at=time.time(),
    )


@dataclass(slots=True)
class TrainingStepDraft:
    """One step while it is made; `told` is the loss that the program told."""

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
        """Return the step as the writer thread knows it."""
        context = StepContext(0, self.number, "train", 0, 0, "", self.started_at, self.started)
        context.wall_ms, context.capture_s = self.wall_s * 1e3, self.own_s
        context.events += self.notes
        return context

    def read(self, passes: StepPasses) -> None:
        """Turn into numbers what a device has computed; it waits for all that was given to it."""
        passes.resolve()
        for kept in (passes.losses, passes.output_gradient_norms):
            kept.extend([float(kept.popleft()) for _ in range(len(kept))])
        self.reported_loss = None if self.reported_loss is None else float(self.reported_loss)
        self.norm_before_clip = (
            None if self.norm_before_clip is None else float(self.norm_before_clip)
        )

    def needs_wait(self) -> bool:
        """Tell whether to `read` this would wait for a device."""
        kept = (
            self.reported_loss,
            self.norm_before_clip,
            *self.passes.losses,
            *self.passes.output_gradient_norms,
        )
        tensors = (*kept, *(one.values for one in self.passes.extremes))
        return self.passes.pending is not None or any(
            isinstance(one, Tensor) and is_remote(one) for one in tensors
        )

    def record(self) -> TrainingStepRecord:
        """Return all that is known by now."""
        self.passes.is_updated = True  # what was not read before the optimizer's step is read now
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
            together = math.fsum(losses) if self.passes.are_shares else fmean(losses)
            return together, LOSS_FROM_OUTPUT
        return math.nan, ""

    def _producer(self, loss: float, source: str) -> AnomalyOrigin | None:
        """Return where trouble began: forward before loss before backward."""
        found = None if self.measured is None else self.measured.producer
        if self.passes.producer is not None:
            return self.passes.producer
        if source and not math.isfinite(loss):
            return AnomalyOrigin("loss", "", 0 if found is None else found.n_carriers + 1)
        if found is None or found.kind != "backward":
            return found
        arrived = [float(norm) for norm in self.passes.output_gradient_norms]
        if all(map(math.isfinite, arrived)):
            return found
        words = f"{found.detail}; it arrives at the model's output, so the loss makes it"
        return AnomalyOrigin(found.kind, found.name, found.n_carriers, words)


@dataclass(frozen=True, slots=True)
class FinishedTrainingStep:
    """What goes to the writer thread of one step."""

    training: TrainingStepRecord
    memory: MemoryRecord | None
    stats: Sequence[LayerStatRecord]


class TrainingRecords:
    """Puts the records of a finished step where the writer thread looks for them."""

    name = "training"

    def record(
        self, step: StepContext, kept: FinishedTrainingStep, values: Values, draft: StepDraft
    ) -> None:
        """Fill in the step's records."""
        draft.training, draft.memory = kept.training, kept.memory
        draft.layer_stats += kept.stats


def timed_synchronize(device: torch.device) -> float:
    """Wait until a GPU has done all that it was given, and return the seconds; else 0."""
    if device.type != "cuda":
        return 0.0
    started = time.perf_counter()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


class StepMemory:
    """Reads the memory of the process and of its GPU; nothing is synchronised."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        self._device = device
        self._rss, self.close = rss_reader()

    def read(self) -> MemoryRecord:
        """Return the memory now; the peak is the allocator's, which only the program resets."""
        if self._device.type != "cuda":
            return MemoryRecord(self._rss(), self._model, 0)
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        sizes = (allocated["current"], reserved["current"], allocated["peak"])
        return MemoryRecord(self._rss(), self._model, 0, *sizes)
