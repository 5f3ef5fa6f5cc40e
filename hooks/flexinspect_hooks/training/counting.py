"""What the control server is told of a watched training run."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Protocol

from flexinspect.trainingfacts import TrainingSummary, TrainingSummaryCounter
from flexinspect_hooks.control.parts import AnomalyCounts, register_counter, unregister_counter


class HasLevel(Protocol):
    """A watched training run, whose level may be set from any thread."""

    level: str


class TrainingCounts:
    """Counts the steps of a training run from its start, or from the last `clear`, on.

    It outlives the run, and holds nothing of it but the count.
    """

    def __init__(self, count: TrainingSummaryCounter, run: HasLevel) -> None:
        self._count, self._baseline = count, TrainingSummary()
        self._run = weakref.ref(run)

    def counts(self) -> AnomalyCounts:
        """Return the figures; each step with an anomaly is one, and each step is kept."""
        now, before = self._count.summary, self._baseline
        since = {
            each.name: getattr(now, each.name) - getattr(before, each.name)
            for each in fields(TrainingSummary)
        }
        return AnomalyCounts(
            total_anomalies=since["anomaly_steps"],
            debug_history_length=since["total_steps"],
            **since,
        )

    def clear(self) -> None:
        """Count from here on; the trace keeps what it has."""
        self._baseline = self._count.summary

    def set_level(self, level: str) -> None:
        """Record as much as `level` says, from the next step on."""
        watched = self._run()
        if watched is not None:
            watched.level = level


_current: list[TrainingCounts] = []


def provide_counts(count: TrainingSummaryCounter, run: HasLevel) -> None:
    """Let the routes of the control server answer from a run, and from no earlier one."""
    while _current:
        unregister_counter("training", _current.pop())
    _current.append(TrainingCounts(count, run))
    register_counter("training", _current[0])
