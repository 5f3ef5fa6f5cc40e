"""Queries of the reader that are not about one forward: findings, events, output, training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.records.finding import Finding
from flexinspect.records.training_step import ParameterGradient, TrainingStepRecord
from flexinspect.trace import codec, schema
from flexinspect.trace.codec import Statement
from flexinspect.trace.file.connections import ReviewKey
from flexinspect.trace.query_base import (
    OPEN_END,
    WHERE_BRANCH,
    WHERE_STEP,
    TraceQueries,
    place_condition,
)
from flexinspect.trace.query_results import EventRow, FindingRow, OutputRow


class FindingQueries(TraceQueries):
    """Queries for findings, reviews, events and output."""

    def findings(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[Finding]:
        """Return findings in order: all, those of one branch, or those of one step of it."""
        rows = self.finding_rows(generation=generation, step=step, branch=branch)
        return [row.finding for row in rows]

    def finding_rows(
        self,
        after_id: int = 0,
        *,
        generation: int | None = None,
        step: int | None = None,
        branch: int = 0,
        limit: int = -1,
    ) -> list[FindingRow]:
        """Return findings with their numbers, those above `after_id`, at most `limit`."""
        where, params = place_condition(generation, branch, step)
        rest = f"{where or 'WHERE true'} AND finding > ? ORDER BY finding LIMIT ?"
        return self._made(codec.decode_finding, schema.FINDINGS, rest, [*params, after_id, limit])

    def reviews(self) -> list[tuple[str, int]]:
        """Return (rule, generation) of each review: a rule that ran after the recording."""
        rows = self._select(schema.REVIEWS, "ORDER BY rule, generation")
        return [(str(row[0]), int(row[1])) for row in rows]

    def add_reviews(self, reviews: Mapping[ReviewKey, Sequence[Statement]]) -> None:
        """Add findings, events and reviews to what this reader returns, without writing them.

        `reviews` maps rule and generation to the statements that would write a review. If the file
        holds a review of the same rule and generation, the stored one is returned instead.
        """
        self._connections.add_overlay(reviews)
        self._added = True

    def remove_added_reviews(self) -> None:
        """Return only what the file holds again, without added reviews."""
        self._connections.remove_overlay()

    def events(
        self,
        after_id: int = 0,
        *,
        generation: int | None = None,
        step: int | None = None,
        limit: int = -1,
    ) -> list[EventRow]:
        """Return events whose number is above `after_id`, in order.

        All of them, or those of a generation or of one step of it; at most `limit`.
        """
        conditions = {"event > ?": after_id, "generation = ?": generation, "step = ?": step}
        used = {sql: value for sql, value in conditions.items() if value is not None}
        params = [*used.values(), limit]
        rest = f"WHERE {' AND '.join(used)} ORDER BY event LIMIT ?"
        return self._made(codec.decode_event, schema.EVENTS, rest, params)

    def output(self, after_id: int = 0, *, limit: int = -1) -> list[OutputRow]:
        """Return the pieces of printed output whose number is above `after_id`, in order."""
        rest = "WHERE number > ? ORDER BY number LIMIT ?"
        return self._made(codec.decode_output, schema.OUTPUT, rest, (after_id, limit))


_RATE_SQL = ", max(json_extract(learning_rates, '$[{}]'))"
_CURVE_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, min(step), max(loss), max(total_norm), "
    "max(loss IS NULL AND loss_source <> ''), max(n_nonfinite > 0){} "
    f"FROM training_steps {WHERE_BRANCH} GROUP BY bucket ORDER BY bucket"
)
_NONFINITE_STEPS_SQL = (
    "SELECT step FROM (SELECT step, row_number() OVER "
    "(PARTITION BY (step - ?) * ? / ? ORDER BY step) AS nth "
    f"FROM training_steps {WHERE_BRANCH} AND n_nonfinite > 0) WHERE nth <= ?"
)
_GROUP_NORMS_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, key, max(value), max(type = 'object') "
    f"FROM training_steps, json_each(group_norms) {WHERE_BRANCH} "
    f"AND (step % ? = 0 OR n_exploding > 0 OR step IN ({_NONFINITE_STEPS_SQL})) "
    "GROUP BY bucket, key"
)
_NEWEST_GROUPS_SQL = (
    "SELECT key, value FROM json_each((SELECT json_extract(data, '$.groups') FROM events "
    "WHERE generation = ? AND kind = 'parameters-changed' ORDER BY event DESC LIMIT 1)) ORDER BY "
    "key"
)
MAX_RATES = 8
"""Number of parameter groups of an optimizer whose learning rates are read for a curve."""
MAX_STEPS_READ = 4096
"""Steps whose norms by group are read for a plot. Of a longer run these are evenly spread steps,
steps with large norms, and as many steps with NaN or Inf (a run may end with only such steps)."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The highest values of some consecutive steps, the first of which is `step`.

    None where nothing was recorded. `rates` are the learning rates of the optimizer's groups. In a
    step that a loss scaler skipped the gradients are non-finite, and the loss is finite.
    """

    step: int
    loss: float | None
    norm: float | None
    has_nonfinite_loss: bool
    has_nonfinite_gradient: bool
    rates: tuple[float | None, ...] = ()


class TrainingQueries(FindingQueries):
    """Queries for training steps."""

    def training_steps(
        self, generation: int, branch: int = 0, start: int = 0, stop: int | None = None
    ) -> dict[int, TrainingStepRecord]:
        """Return the training steps `start <= step < stop` by number, without their gradients."""
        rest = f"{WHERE_BRANCH} AND step >= ? AND step < ? ORDER BY step"
        params = (generation, branch, start, OPEN_END if stop is None else stop)
        rows = self._select(schema.TRAINING_STEPS, rest, params, skip=2)
        return {row[0]: self._decode(codec.TRAINING_ROWS.decode, row[1:]) for row in rows}

    def training_step(
        self, generation: int, step: int, branch: int = 0
    ) -> TrainingStepRecord | None:
        """Return one training step with its gradients, None when it is not recorded."""
        key = (generation, branch, step)
        rows = self._select(schema.TRAINING_STEPS, WHERE_STEP, key, skip=3)
        if not rows:
            return None
        gradients = self.training_gradients(generation, step, branch)
        return self._decode(
            lambda row: codec.TRAINING_ROWS.decode(row, gradients=tuple(gradients)), rows[0]
        )

    def training_gradients(
        self, generation: int, step: int, branch: int = 0
    ) -> list[ParameterGradient]:
        """Return the parameter gradients that were recorded for a training step."""
        key = (generation, branch, step)
        sql = f"SELECT name, norm, max, n_nan, n_inf FROM grads {WHERE_STEP} ORDER BY name"
        return [self._decode(codec.decode_parameter_gradient, row) for row in self._query(sql, key)]

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
        """Return at most `n_points` points of the `n_steps` steps from `first` on, by number.

        Points without any recorded step are missing. Each has the learning rates of the optimizer's
        first `n_rates` groups.
        """
        params = (first, n_points, n_steps, generation, branch)
        rates = "".join(_RATE_SQL.format(group) for group in range(min(n_rates, MAX_RATES)))
        return {row[0]: _curve_point(row) for row in self._query(_CURVE_SQL.format(rates), params)}

    def group_curve(
        self, generation: int, first: int, n_steps: int, n_points: int, branch: int = 0
    ) -> dict[tuple[int, int], float]:
        """Return the highest norm by (point, group), NaN where a norm was non-finite."""
        stride = max(n_steps // MAX_STEPS_READ, 1)
        key = (first, n_points, n_steps, generation, branch)
        params = (*key, stride, *key, max(MAX_STEPS_READ // n_points, 1))
        return {
            (row[0], row[1]): math.nan if row[3] else float(row[2])
            for row in self._query(_GROUP_NORMS_SQL, params)
        }

    def added_groups(self, generation: int) -> tuple[str, ...]:
        """Return all groups of parameters as last reported, empty if none were added.

        They begin with the groups that the run declared at its start.
        """
        return tuple(str(name) for _, name in self._query(_NEWEST_GROUPS_SQL, (generation,)))


def _curve_point(row: Sequence[Any]) -> CurvePoint:
    _, step, loss, norm, has_nonfinite_loss, has_nonfinite_gradient, *rates = row
    return CurvePoint(
        step=step,
        loss=_curve_value(loss),
        norm=_curve_value(norm),
        has_nonfinite_loss=bool(has_nonfinite_loss),
        has_nonfinite_gradient=bool(has_nonfinite_gradient),
        # A learning rate of NaN is unknown.
        rates=tuple(None if isinstance(rate, str) else _curve_value(rate) for rate in rates),
    )


def _curve_value(value: Any) -> float | None:
    """Return a number of the trace: NULL stands for None, and text for NaN."""
    if isinstance(value, str):
        return math.nan
    return None if value is None else float(value)
