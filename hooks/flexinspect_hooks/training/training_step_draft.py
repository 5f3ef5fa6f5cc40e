"""The data of a training step until it is complete, and the generation that stands for a run."""

from __future__ import annotations

import math
import time
from collections import Counter
from statistics import fmean
from typing import Any, cast

from msgspec import field
from msgspec.structs import replace
from torch import Tensor
from torch.optim import Optimizer

from flexinspect.records import training_step
from flexinspect.records.collectives import WEIGHTS_STREAM
from flexinspect.records.step import ArrayRecord, GenerationRecord, MemoryRecord
from flexinspect_hooks.capture.collective_log import collective_arrays
from flexinspect_hooks.capture.hook import Hook
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values
from flexinspect_hooks.training.forward_passes import StepPasses, is_remote
from flexinspect_hooks.training.live_ranks import LiveRanks
from flexinspect_hooks.training.measurement import GradientMeter
from flexinspect_hooks.training.step_checks import EVENT as CHECK_EVENT

Loss = float | Tensor

TRAINING_SAMPLE_ID = "training"  # the `sample_id` of the generation that represents a training run


def training_generation(
    meter: GradientMeter, optimizer: Optimizer | None, number: int, model: str
) -> GenerationRecord:
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
    sample = f"{TRAINING_SAMPLE_ID} {model}".strip()
    record = GenerationRecord(number, sample, "", "", (), (), model=model)
    return replace(record, declared={"training": facts}, started_at=time.time())


_RECORDED_FIELDS = (  # that a draft and the record of its step have under the same name
    *("learning_rates", "max_norm", "group_ratios", "n_backward"),
    *("scale", "is_skipped", "device", "autocast", "detail"),
)


class TrainingStepDraft(StepPasses):
    """The data of one step until it is complete; the program passed `reported_loss` to `step`."""

    number: int = 0
    is_measured: bool = True
    """Whether its gradients are measured, and its checks made."""
    started: float = 0.0
    started_at: float = 0.0
    measured: training_step.TrainingStepRecord | None = None
    learning_rates: tuple[float, ...] = ()
    group_ratios: tuple[float, ...] = ()
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
    collectives: tuple[Any, ...] = ()
    weights: dict[str, Any] = field(default_factory=dict)
    """By stream, the sums of their bits by group, on their device until `read`."""
    notes: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def context(self, generation: int) -> StepContext:
        """The step's context for the writer thread."""
        place = (generation, self.number, "train", 0, 0, "", self.started_at)
        context = StepContext(*place, started=self.started)
        context.wall_ms, context.capture_s = self.wall_s * 1e3, self.own_s
        context.events += self.notes
        return context

    def read(self) -> None:
        """Convert results on a device to numbers, which waits for the device."""
        self.resolve()
        for values in (self.losses, self.backward_losses, self.output_gradient_norms):
            values.extend([float(values.popleft()) for _ in range(len(values))])
        loss, norm = self.reported_loss, self.norm_before_clip
        self.reported_loss = None if loss is None else float(loss)
        self.norm_before_clip = None if norm is None else float(norm)
        for stream, sums in self.weights.items():
            self.weights[stream] = sums.cpu().numpy() if isinstance(sums, Tensor) else sums

    def needs_wait(self) -> bool:
        """Whether `read` would wait for a device."""
        values = [self.reported_loss, self.norm_before_clip, *self.losses, *self.backward_losses]
        values += self.weights.values()
        values += [*self.output_gradient_norms, *(one.values for one in self.extremes)]
        tensors = (value for value in values if isinstance(value, Tensor))
        return self.pending is not None or any(map(is_remote, tensors))

    def record(self) -> training_step.TrainingStepRecord:
        """The record of the step from everything that is known."""
        self.is_updated = True  # results not read yet are read after the optimizer's step
        self.read()
        loss, source = self._loss()
        spent = self.forward_s + self.backward_s + self.optimizer_s
        spent += (self.data_s or 0.0) + self.own_s + self.waited_s
        return replace(
            self.measured or training_step.TrainingStepRecord(loss, source, ()),
            loss=loss,
            loss_source=source,
            norm_before_clip=cast(float | None, self.norm_before_clip),
            anomaly_origin=self._producer(loss, source),
            forward_ms=self.forward_s * 1e3,
            backward_ms=self.backward_s * 1e3,
            optimizer_ms=self.optimizer_s * 1e3,
            data_ms=None if self.data_s is None else self.data_s * 1e3,
            other_ms=max(self.wall_s - spent, 0.0) * 1e3,
            **{name: getattr(self, name) for name in _RECORDED_FIELDS},
        )

    def _loss(self) -> tuple[float, str]:
        if self.reported_loss is not None:
            return float(self.reported_loss), training_step.LOSS_REPORTED
        if self.losses:
            losses = [*map(float, self.losses)]
            loss = math.fsum(losses) if self.are_shares else fmean(losses)
            return loss, training_step.LOSS_FROM_OUTPUT
        if self.backward_losses:
            return fmean(map(float, self.backward_losses)), training_step.LOSS_FROM_BACKWARD
        return math.nan, ""

    def _producer(self, loss: float, source: str) -> training_step.AnomalyOrigin | None:
        """Where the anomaly began: in the forward pass, else in the loss, else in the backward."""
        origin = None if self.measured is None else self.measured.anomaly_origin
        if self.producer is not None:
            return self.producer
        if source and not math.isfinite(loss):
            n_affected = 0 if origin is None else origin.n_affected + 1
            return training_step.AnomalyOrigin("loss", "", n_affected)
        if origin is None or origin.kind != "backward":
            return origin
        if all(math.isfinite(float(norm)) for norm in self.output_gradient_norms):
            return origin
        detail = f"{origin.detail}; it arrives at the model's output, so the loss makes it"
        return training_step.AnomalyOrigin(origin.kind, origin.name, origin.n_affected, detail)


class TrainingRecords(Hook):
    """The hook that adds a finished step to the draft of the writer thread."""

    name = "training"

    def __init__(self, ranks: LiveRanks) -> None:
        self._ranks = ranks

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        """Add the step's record, its memory and the statistics of its outputs."""
        draft.training, finished = kept
        weights = finished.weights.get(WEIGHTS_STREAM, ())
        if (found := self._ranks.compare(step.step, draft.training, weights)) is not None:
            text, facts = found
            step.events.append((CHECK_EVENT, text, facts))
        draft.memory = finished.memory
        draft.layer_stats += finished.stats
        draft.arrays += collective_arrays(finished.collectives)
        draft.arrays += [ArrayRecord(stream, sums) for stream, sums in finished.weights.items()]
