"""The numbers of a step as named series, for formats that draw curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexinspect.records.step import LogitsRecord, StepRecord
from flexinspect.records.training_step import TrainingStepRecord

MEMORY = ("rss", "model", "kv_cache", "cuda_allocated", "cuda_reserved", "cuda_peak")
_TRAINING_TIMES = ("forward_ms", "backward_ms", "optimizer_ms", "data_ms", "other_ms")


class StepValue(NamedTuple):
    """A number of a step: `name` is "group/name", `unit` nats, bytes, ms or empty."""

    name: str
    value: float
    unit: str = ""


def step_values(step: StepRecord, groups: Sequence[str] = ()) -> Iterator[StepValue]:
    """Yield what was measured of a step; `groups` name the norms of a training step."""
    if step.logits is not None:
        yield from _logits_values(step.logits)
    for name in MEMORY if step.memory is not None else ():
        n_bytes = getattr(step.memory, name)
        if n_bytes is not None:
            yield StepValue(f"memory/{name}", n_bytes, "bytes")
    yield StepValue("time/wall_ms", step.wall_ms, "ms")
    yield StepValue("time/capture_ms", step.capture_ms, "ms")
    if step.training is not None:
        yield from _training_values(step.training, groups)


def _logits_values(logits: LogitsRecord) -> Iterator[StepValue]:
    yield StepValue("logits/entropy", logits.entropy, "nats")
    yield StepValue("logits/margin", logits.margin)
    # NaN if the chosen token was not observed; more than 0 only in a damaged trace.
    yield StepValue("logits/chosen_probability", math.exp(min(logits.chosen_logprob, 0.0)))


def _training_values(training: TrainingStepRecord, groups: Sequence[str]) -> Iterator[StepValue]:
    if training.loss_source:
        yield StepValue("training/loss", training.loss)
    for number, rate in enumerate(training.learning_rates):
        yield StepValue(f"learning_rate/group_{number}", rate)
    for name in ("total_norm", "norm_before_clip", "max_norm"):
        norm = getattr(training, name)
        if norm is not None:
            yield StepValue(f"gradients/{name}", norm)
    for name in _TRAINING_TIMES:
        milliseconds = getattr(training, name)
        if milliseconds is not None:
            yield StepValue(f"time/{name}", milliseconds, "ms")
    for kind, values in (
        ("gradient_norm", training.group_norms),
        ("update_ratio", training.group_ratios),
    ):
        for number, value in enumerate(values):
            group = groups[number] if number < len(groups) else f"group {number}"
            yield StepValue(f"{kind}/{group}", value)
