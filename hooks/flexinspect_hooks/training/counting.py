"""What the control server is told of a watched training run."""

from __future__ import annotations

from dataclasses import fields

from flexinspect.trainingfacts import SummaryCount, TrainingSummary
from flexinspect_hooks.control.parts import Counts, provide, withdraw


class TrainingCounts:
    """Counts the steps of a training run from its start, or from the last `clear`, on.

    It outlives the run, and holds nothing of it but the count.
    """

    def __init__(self, count: SummaryCount) -> None:
        self._count, self._cleared = count, TrainingSummary()

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


_last: list[TrainingCounts] = []


def answer_from(count: SummaryCount) -> None:
    """Let the routes of the control server answer from a run, and from no earlier one."""
    while _last:
        withdraw("training", _last.pop())
    _last.append(TrainingCounts(count))
    provide("training", _last[0])
