"""What a trace is asked about training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexinspect.trace import decode, schema, trainingcode
from flexinspect.trace.queries import BRANCH, STEP
from flexinspect.trace.said import SaidQueries
from flexinspect.trainingfacts import GradientFacts, TrainingStepRecord

_MANY = 1 << 62


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


def _gradient(row: Sequence[Any]) -> GradientFacts:
    kinds = ("text", "real", "real", "int", "int")
    return trainingcode.gradient(decode.clean_as(kinds, row, "grads"))


def _step(row: Sequence[Any], gradients: Sequence[GradientFacts] = ()) -> TrainingStepRecord:
    try:
        return trainingcode.training_step(row, gradients)
    except ValueError as error:
        raise decode.Damage(str(error)) from None
