"""What a trace is asked about training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.trace import decode, schema, trainingcode
from flexinspect.trace.queries import BRANCH, STEP
from flexinspect.trace.said import SaidQueries
from flexinspect.trainingfacts import GradientFacts, TrainingStepRecord

_MANY = 1 << 62

_RATE = ", max(json_extract(learning_rates, '$[{}]'))"
_CURVE = (
    "SELECT (step - ?) * ? / ? AS bucket, min(step), max(loss), max(total_norm), "
    "max(loss IS NULL AND loss_source <> ''), max(n_sick > 0){} "
    f"FROM training_steps {BRANCH} GROUP BY bucket ORDER BY bucket"
)
_SICK = (
    "SELECT step FROM (SELECT step, row_number() OVER "
    "(PARTITION BY (step - ?) * ? / ? ORDER BY step) AS nth "
    f"FROM training_steps {BRANCH} AND n_sick > 0) WHERE nth <= ?"
)
_GROUPS = (
    "SELECT (step - ?) * ? / ? AS bucket, key, max(value), max(type = 'object') "
    f"FROM training_steps, json_each(group_norms) {BRANCH} "
    f"AND (step % ? = 0 OR n_exploding > 0 OR step IN ({_SICK})) GROUP BY bucket, key"
)
_NEWEST_GROUPS = (
    "SELECT key, value FROM json_each((SELECT json_extract(data, '$.groups') FROM events "
    "WHERE generation = ? AND kind = 'parameters' ORDER BY event DESC LIMIT 1)) ORDER BY key"
)
MOST_RATES = 8
"""Groups of an optimizer whose learning rates are read for a curve."""
MOST_READ = 4096
"""Steps whose norms by group are read for a picture; of more, evenly spread ones, those with
large norms, and as many of those with NaN or Inf (a run may end in nothing else)."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The highest values of some steps that follow each other, the first of which is `step`.

    None where nothing was recorded. `rates` are those of the optimizer's groups. The gradients of
    a step that a loss scaler left out are not finite, and its loss is.
    """

    step: int
    loss: float | None
    norm: float | None
    has_sick_loss: bool
    has_sick_gradient: bool
    rates: tuple[float | None, ...] = ()


class TrainingQueries(SaidQueries):
    """The part of the reader that is about training steps."""

    def training_steps(
        self, generation: int, branch: int = 0, start: int = 0, stop: int | None = None
    ) -> dict[int, TrainingStepRecord]:
        """Return the training steps `start <= step < stop` by number, without their gradients."""
        rest = f"{BRANCH} AND step >= ? AND step < ? ORDER BY step"
        params = (generation, branch, start, _MANY if stop is None else stop)
        rows = self._select(schema.TRAINING_STEPS, rest, params, skip=2)
        return {row[0]: self._guard(_step, row[1:]) for row in rows}

    def training_step(
        self, generation: int, step: int, branch: int = 0
    ) -> TrainingStepRecord | None:
        """Return one training step with its gradients, None when it is not recorded."""
        key = (generation, branch, step)
        rows = self._select(schema.TRAINING_STEPS, STEP, key, skip=3)
        if not rows:
            return None
        gradients = self.training_gradients(*(generation, step, branch))
        return self._guard(lambda row: _step(row, gradients), rows[0])

    def training_gradients(
        self, generation: int, step: int, branch: int = 0
    ) -> list[GradientFacts]:
        """Return the gradients of parameters that were recorded for a training step."""
        key = (generation, branch, step)
        sql = f"SELECT name, norm, max, n_nan, n_inf FROM grads {STEP} ORDER BY name"
        return [self._guard(_gradient, row) for row in self._query(sql, key)]

    def training_curve(
        self,
        generation: int,
        first: int,
        n_steps: int,
        n_points: int,
        branch: int = 0,
        *,
        n_rates: int = 1,
    ) -> dict[int, CurvePoint]:
        """Return `n_points` points of the steps from `first` on, by number; some may be missing.

        They have the learning rates of the optimizer's first `n_rates` groups.
        """
        params = (first, n_points, n_steps, generation, branch)
        rates = "".join(_RATE.format(group) for group in range(min(n_rates, MOST_RATES)))
        return {row[0]: _point(row) for row in self._query(_CURVE.format(rates), params)}

    def group_curve(
        self, generation: int, first: int, n_steps: int, n_points: int, branch: int = 0
    ) -> dict[tuple[int, int], float]:
        """Return the highest norm by point and group, NaN where one was not finite."""
        stride = max(n_steps // MOST_READ, 1)
        key = (first, n_points, n_steps, generation, branch)
        params = (*key, stride, *key, max(MOST_READ // n_points, 1))
        return {
            (row[0], row[1]): math.nan if row[3] else float(row[2])
            for row in self._query(_GROUPS, params)
        }

    def added_groups(self, generation: int) -> tuple[str, ...]:
        """Return all groups of parameters as the run told them last; empty if none came later.

        They begin with those that it declared at its start.
        """
        return tuple(str(name) for _, name in self._query(_NEWEST_GROUPS, (generation,)))


def _point(row: Sequence[Any]) -> CurvePoint:
    _, step, loss, norm, sick_loss, sick_gradient, *rates = row
    # Of a rate NaN means that nobody knows it.
    known = tuple(None if isinstance(rate, str) else _number(rate) for rate in rates)
    sick = (bool(sick_loss), bool(sick_gradient))
    return CurvePoint(step, _number(loss), _number(norm), *sick, known)


def _number(value: Any) -> float | None:
    """Return a number of the trace: NULL is none, and text stands for NaN."""
    if isinstance(value, str):
        return math.nan
    return None if value is None else float(value)


def _gradient(row: Sequence[Any]) -> GradientFacts:
    kinds = ("text", "real", "real", "int", "int")
    return trainingcode.gradient(decode.clean_as(kinds, row, "grads"))


def _step(row: Sequence[Any], gradients: Sequence[GradientFacts] = ()) -> TrainingStepRecord:
    try:
        return trainingcode.training_step(row, gradients)
    except ValueError as error:
        raise decode.Damage(str(error)) from None
