"""Training steps into rows and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexinspect.trace import schema
from flexinspect.trace.columns import insert_sql
from flexinspect.trace.values import to_json
from flexinspect.trainingfacts import AnomalyOrigin, ParameterGradient, TrainingStepRecord, group_of

N_GRAD_COLUMNS = 8
"""Columns of `grads` that say something of a training step: up to `n_inf`."""

Statement = tuple[str, Sequence[Any]]
RowKey = tuple[int, int, int]

_GRADIENTS_PER_INSERT = 64


def encode_training_step(key: RowKey, record: TrainingStepRecord) -> list[Statement]:
    """Return the statements of a training step with its gradients."""
    out: list[Statement] = [
        (insert_sql(schema.TRAINING_STEPS, 1), [*key, *_training_values(record)])
    ]
    nothing = (None,) * (len(schema.GRADS.columns) - N_GRAD_COLUMNS)
    for start in range(0, len(record.gradients), _GRADIENTS_PER_INSERT):
        part = record.gradients[start : start + _GRADIENTS_PER_INSERT]
        flat: list[Any] = []
        for facts in part:
            flat += (*key, facts.name, facts.norm, facts.max, facts.n_nan, facts.n_inf, *nothing)
        out.append((insert_sql(schema.GRADS, len(part)), flat))
    return out


def _training_values(record: TrainingStepRecord) -> tuple[Any, ...]:
    producer = None if record.producer is None else to_json(asdict(record.producer))
    return (
        *(record.loss, record.loss_source, _floats_to_json(record.learning_rates)),
        *map(_nan_as_text, (record.total_norm, record.norm_before_clip, record.max_norm)),
        *(record.n_parameters, record.n_exploding, record.n_vanishing),
        *(record.n_dead, record.n_sick),
        *(
            _floats_to_json(record.group_norms),
            _floats_to_json(record.group_ratios),
            producer,
            record.n_backward,
        ),
        *(record.forward_ms, record.backward_ms, record.optimizer_ms),
        *(_nan_as_text(record.data_ms), record.other_ms, _nan_as_text(record.scale)),
        *(int(record.is_skipped), record.device, record.autocast, record.detail),
    )


def _floats_to_json(values: Sequence[float]) -> str:
    if all(map(math.isfinite, values)):
        return str([*values])  # JSON already, at a third of the price
    return to_json([*values])


def _nan_as_text(value: float | None) -> float | str | None:
    """SQLite would make NULL of a NaN, which here means "none"."""
    return "nan" if value != value else value


def decode_training_step(
    values: Sequence[Any], gradients: Sequence[ParameterGradient] = ()
) -> TrainingStepRecord:
    """Return a training step from the cleaned columns after its key. Raises `ValueError`."""
    fields: dict[str, Any] = dict(zip(schema.TRAINING_STEPS.names[3:], values, strict=True))
    for name in ("learning_rates", "group_norms", "group_ratios"):
        fields[name] = _decode_floats(fields[name])
    if fields["producer"] is not None:
        fields["producer"] = _decode_origin(fields["producer"])
    return TrainingStepRecord(**fields, gradients=tuple(gradients))


def decode_parameter_gradient(values: Sequence[Any]) -> ParameterGradient:
    """Return a parameter's gradient from the cleaned columns `name` to `n_inf`."""
    name, norm, largest, n_nan, n_inf = values
    is_missing = largest != largest and not n_nan
    return ParameterGradient(
        name, norm, None if is_missing else largest, n_nan, n_inf, group_of(name)
    )


def _decode_floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(one) not in (int, float) for one in values):
        raise ValueError("a list of numbers holds something else")
    return tuple(map(float, values))


def _decode_origin(said: Any) -> AnomalyOrigin:
    try:
        return AnomalyOrigin(**said)
    except TypeError as error:
        raise ValueError(f"no producer ({error})") from None
