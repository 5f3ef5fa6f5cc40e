"""Training steps into rows and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexinspect.trace import schema
from flexinspect.trace.columns import insert_sql
from flexinspect.trace.values import to_json
from flexinspect.trainingfacts import GradientFacts, Producer, TrainingStepRecord, group_of

GRAD_COLUMNS = 8
"""Columns of `grads` that say something of a training step: up to `n_inf`."""

Statement = tuple[str, Sequence[Any]]
Key = tuple[int, int, int]

_ROWS = 64


def statements(key: Key, record: TrainingStepRecord) -> list[Statement]:
    """Return the statements of a training step with its gradients."""
    out: list[Statement] = [(insert_sql(schema.TRAINING_STEPS, 1), [*key, *_row(record)])]
    nothing = (None,) * (len(schema.GRADS.columns) - GRAD_COLUMNS)
    for start in range(0, len(record.gradients), _ROWS):
        part = record.gradients[start : start + _ROWS]
        flat: list[Any] = []
        for facts in part:
            flat += (*key, facts.name, facts.norm, facts.max, facts.n_nan, facts.n_inf, *nothing)
        out.append((insert_sql(schema.GRADS, len(part)), flat))
    return out


def _row(record: TrainingStepRecord) -> tuple[Any, ...]:
    producer = None if record.producer is None else to_json(asdict(record.producer))
    return (
        *(record.loss, record.loss_source, _list(record.learning_rates)),
        *map(_optional, (record.total_norm, record.norm_before_clip, record.max_norm)),
        *(record.n_parameters, record.n_exploding, record.n_vanishing),
        *(record.n_dead, record.n_sick),
        *(_list(record.group_norms), _list(record.group_ratios), producer, record.n_backward),
        *(record.forward_ms, record.backward_ms, record.optimizer_ms),
        *(_optional(record.data_ms), record.other_ms, _optional(record.scale)),
        *(int(record.is_skipped), record.device, record.autocast, record.detail),
    )


def _list(values: Sequence[float]) -> str:
    if all(map(math.isfinite, values)):
        return str([*values])  # JSON already, at a third of the price
    return to_json([*values])


def _optional(value: float | None) -> float | str | None:
    """SQLite would make NULL of a NaN, which here means "none"."""
    return "nan" if value != value else value


def training_step(
    values: Sequence[Any], gradients: Sequence[GradientFacts] = ()
) -> TrainingStepRecord:
    """Return a training step from the cleaned columns after its key. Raises `ValueError`."""
    fields: dict[str, Any] = dict(zip(schema.TRAINING_STEPS.names[3:], values, strict=True))
    for name in ("learning_rates", "group_norms", "group_ratios"):
        fields[name] = _floats(fields[name])
    if fields["producer"] is not None:
        fields["producer"] = _producer(fields["producer"])
    return TrainingStepRecord(**fields, gradients=tuple(gradients))


def gradient(values: Sequence[Any]) -> GradientFacts:
    """Return a parameter's gradient from the cleaned columns `name` to `n_inf`."""
    name, norm, largest, n_nan, n_inf = values
    is_missing = largest != largest and not n_nan
    return GradientFacts(name, norm, None if is_missing else largest, n_nan, n_inf, group_of(name))


def _floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(one) not in (int, float) for one in values):
        raise ValueError("a list of numbers holds something else")
    return tuple(map(float, values))


def _producer(said: Any) -> Producer:
    try:
        return Producer(**said)
    except TypeError as error:
        raise ValueError(f"no producer ({error})") from None
