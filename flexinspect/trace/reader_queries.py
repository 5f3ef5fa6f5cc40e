"""Reading what is said about a run: by rules, by capture, and by the program itself."""

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
from flexinspect.trace.rows import EventRow, FindingRow, OutputRow


class FindingQueries(TraceQueries):
    """The questions about findings, reviews, events and output."""

    def findings(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[Finding]:
        """Return what the rules said, in order: all, of one branch, or of one step of it."""
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
        """Return findings with their numbers, from above `after_id` on, at most `limit`."""
        where, params = place_condition(generation, branch, step)
        rest = f"{where or 'WHERE true'} AND finding > ? ORDER BY finding LIMIT ?"
        return self._records(
            codec.decode_finding, schema.FINDINGS, rest, [*params, after_id, limit]
        )

    def reviews(self) -> list[tuple[str, int]]:
        """Return which rules have looked at which generations after these were recorded."""
        rows = self._select(schema.REVIEWS, "ORDER BY rule, generation")
        return [(str(row[0]), int(row[1])) for row in rows]

    def add_reviews(self, reviews: Mapping[ReviewKey, Sequence[Statement]]) -> None:
        """Let this reader say more findings, events and reviews than its file holds.

        `reviews` are by rule and generation what would write them; the file stays as it is, and
        what it holds by then of the same rule and generation counts.
        """
        self._connections.add_overlay(reviews)
        self._added = True

    def remove_added_reviews(self) -> None:
        """Say again what the file holds, and nothing of what was added."""
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
        where = [("event", after_id), ("generation", generation), ("step", step)]
        used = [(name, value) for name, value in where if value is not None]
        tests = " AND ".join(f"{name} {'>' if name == 'event' else '='} ?" for name, _ in used)
        params = [*(value for _, value in used), limit]
        rest = f"WHERE {tests} ORDER BY event LIMIT ?"
        return self._records(codec.decode_event, schema.EVENTS, rest, params)

    def output(self, after_id: int = 0, *, limit: int = -1) -> list[OutputRow]:
        """Return what the program printed, pieces with numbers above `after_id`, in order."""
        rest = "WHERE number > ? ORDER BY number LIMIT ?"
        return self._records(codec.decode_output, schema.OUTPUT, rest, (after_id, limit))


_RATE_SQL = ", max(json_extract(learning_rates, '$[{}]'))"
_CURVE_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, min(step), max(loss), max(total_norm), "
    "max(loss IS NULL AND loss_source <> ''), max(n_sick > 0){} "
    f"FROM training_steps {WHERE_BRANCH} GROUP BY bucket ORDER BY bucket"
)
_NONFINITE_STEPS_SQL = (
    "SELECT step FROM (SELECT step, row_number() OVER "
    "(PARTITION BY (step - ?) * ? / ? ORDER BY step) AS nth "
    f"FROM training_steps {WHERE_BRANCH} AND n_sick > 0) WHERE nth <= ?"
)
_GROUP_NORMS_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, key, max(value), max(type = 'object') "
    f"FROM training_steps, json_each(group_norms) {WHERE_BRANCH} "
    f"AND (step % ? = 0 OR n_exploding > 0 OR step IN ({_NONFINITE_STEPS_SQL})) GROUP BY bucket, key"
)
_NEWEST_GROUPS_SQL = (
    "SELECT key, value FROM json_each((SELECT json_extract(data, '$.groups') FROM events "
    "WHERE generation = ? AND kind = 'parameters' ORDER BY event DESC LIMIT 1)) ORDER BY key"
)
MAX_RATES = 8
"""Groups of an optimizer whose learning rates are read for a curve."""
MAX_STEPS_READ = 4096
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
    has_nonfinite_loss: bool
    has_nonfinite_gradient: bool
    rates: tuple[float | None, ...] = ()


class TrainingQueries(FindingQueries):
    """The part of the reader that is about training steps."""

    def training_steps(
        self, generation: int, branch: int = 0, start: int = 0, stop: int | None = None
    ) -> dict[int, TrainingStepRecord]:
        """Return the training steps `start <= step < stop` by number, without their gradients."""
        rest = f"{WHERE_BRANCH} AND step >= ? AND step < ? ORDER BY step"
        params = (generation, branch, start, OPEN_END if stop is None else stop)
        rows = self._select(schema.TRAINING_STEPS, rest, params, skip=2)
        return {row[0]: self._decode(_training_step, row[1:]) for row in rows}

    def training_step(
        self, generation: int, step: int, branch: int = 0
    ) -> TrainingStepRecord | None:
        """Return one training step with its gradients, None when it is not recorded."""
        key = (generation, branch, step)
        rows = self._select(schema.TRAINING_STEPS, WHERE_STEP, key, skip=3)
        if not rows:
            return None
        gradients = self.training_gradients(*(generation, step, branch))
        return self._decode(lambda row: _training_step(row, gradients), rows[0])

    def training_gradients(
        self, generation: int, step: int, branch: int = 0
    ) -> list[ParameterGradient]:
        """Return the gradients of parameters that were recorded for a training step."""
        key = (generation, branch, step)
        sql = f"SELECT name, norm, max, n_nan, n_inf FROM grads {WHERE_STEP} ORDER BY name"
        return [self._decode(_parameter_gradient, row) for row in self._query(sql, key)]

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
        rates = "".join(_RATE_SQL.format(group) for group in range(min(n_rates, MAX_RATES)))
        return {row[0]: _curve_point(row) for row in self._query(_CURVE_SQL.format(rates), params)}

    def group_curve(
        self, generation: int, first: int, n_steps: int, n_points: int, branch: int = 0
    ) -> dict[tuple[int, int], float]:
        """Return the highest norm by point and group, NaN where one was not finite."""
        stride = max(n_steps // MAX_STEPS_READ, 1)
        key = (first, n_points, n_steps, generation, branch)
        params = (*key, stride, *key, max(MAX_STEPS_READ // n_points, 1))
        return {
            (row[0], row[1]): math.nan if row[3] else float(row[2])
            for row in self._query(_GROUP_NORMS_SQL, params)
        }

    def added_groups(self, generation: int) -> tuple[str, ...]:
        """Return all groups of parameters as the run told them last; empty if none came later.

        They begin with those that it declared at its start.
        """
        return tuple(str(name) for _, name in self._query(_NEWEST_GROUPS_SQL, (generation,)))


def _curve_point(row: Sequence[Any]) -> CurvePoint:
    _, step, loss, norm, sick_loss, sick_gradient, *rates = row
    # Of a rate NaN means that nobody knows it.
    known = tuple(None if isinstance(rate, str) else _curve_value(rate) for rate in rates)
    sick = (bool(sick_loss), bool(sick_gradient))
    return CurvePoint(step, _curve_value(loss), _curve_value(norm), *sick, known)


def _curve_value(value: Any) -> float | None:
    """Return a number of the trace: NULL is none, and text stands for NaN."""
    if isinstance(value, str):
        return math.nan
    return None if value is None else float(value)


def _parameter_gradient(row: Sequence[Any]) -> ParameterGradient:
    kinds = ("text", "real", "real", "int", "int")
    return codec.decode_parameter_gradient(codec.decode_values(kinds, row, "grads"))


def _training_step(
    row: Sequence[Any], gradients: Sequence[ParameterGradient] = ()
) -> TrainingStepRecord:
    try:
        return codec.decode_training_step(row, gradients)
    except ValueError as error:
        raise codec.DamagedValueError(str(error)) from None
