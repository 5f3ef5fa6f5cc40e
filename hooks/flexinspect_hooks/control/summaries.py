"""The summaries of anomalies that the server answers, from whoever counts them in this process."""

from __future__ import annotations

from typing import get_args

from flexinspect.control.codec import from_json
from flexinspect.control.messages import (
    AnomalySummary,
    DebugSummaryResponse,
    TrainingAnomalySummary,
    TrainingSummaryResponse,
)
from flexinspect_hooks.control.parts import (
    AnomalyCounts,
    DebuggerKind,
    SupportsLevel,
    active_counter,
)


def debug_summary() -> DebugSummaryResponse:
    """Return what all debuggers have met; zeros for those that nobody registered."""
    return DebugSummaryResponse(
        _training_anomalies(_counts("training")),
        _anomalies(_counts("diffusion")),
        _anomalies(_counts("general")),
    )


def training_summary() -> TrainingSummaryResponse:
    """Return what training met."""
    return from_json(TrainingSummaryResponse, _counts("training").as_dict())


def clear() -> None:
    """Let every debugger forget its history."""
    for debugger in get_args(DebuggerKind):
        found = active_counter(debugger)
        if found is not None:
            found.clear()


def set_level(level: str) -> None:
    """Let every debugger that has a level look at as much as this one says."""
    for debugger in get_args(DebuggerKind):
        found: object = active_counter(debugger)
        if isinstance(found, SupportsLevel):
            found.set_level(level)


def _training_anomalies(counts: AnomalyCounts) -> TrainingAnomalySummary:
    """Return the short summary of training; its `anomaly_rate` counts anomalies, not steps."""
    return TrainingAnomalySummary(
        total_anomalies=counts.total_anomalies,
        debug_history_length=counts.debug_history_length,
        total_steps=counts.total_steps,
        anomaly_rate=counts.total_anomalies / counts.total_steps if counts.total_steps else 0.0,
        gradient_explosion_rate=counts.gradient_explosion_rate,
    )


def _counts(debugger: DebuggerKind) -> AnomalyCounts:
    found = active_counter(debugger)
    return found.counts() if found is not None else AnomalyCounts()


def _anomalies(counts: AnomalyCounts) -> AnomalySummary:
    return AnomalySummary(counts.total_anomalies, counts.debug_history_length)
