"""What the control server is told of a watched training run."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Protocol

from flexinspect.trainingfacts import SummaryCount, TrainingSummary
from flexinspect_hooks.control.parts import Counts, provide, withdraw


class Watched(Protocol):
    """A watched training run, whose level may be set from any thread."""

    level: str


class TrainingCounts:
    """Counts the steps of a training run from its start, or from the last `clear`, on.

    It outlives the run, and holds nothing of it but the count.
    """

    def __init__(self, count: SummaryCount, watched: Watched) -> None:
        self._count, self._cleared = count, TrainingSummary()
        self._watched = weakref.ref(watched)

    def counts(self) -> Counts:
        """Return the figures; each step with an anomaly is one, and each step is kept."""
        now, before = self._count.summary, self._cleared
        since = {
            each.name: getattr(now, each.name) - getattr(before, each.name)
            for each in fields(TrainingSummary)
        }
        return Counts(
            total_anomalies=since["anomaly_steps"],
            debug_history_length=since["total_steps"],
            **since,
        )

    def clear(self) -> None:
        """Count from here on; the trace keeps what it has."""
        self._cleared = self._count.summary

    def set_level(self, level: str) -> None:
        """Record as much as `level` says, from the next step on."""
        watched = self._watched()
        if watched is not None:
            watched.level = level


_last: list[TrainingCounts] = []


def answer_from(count: SummaryCount, watched: Watched) -> None:
    """Let the routes of the control server answer from a run, and from no earlier one."""
    while _last:
        withdraw("training", _last.pop())
    _last.append(TrainingCounts(count, watched))
    provide("training", _last[0])
