"""The parts of a capture that the control server uses besides the step barrier, as protocols.

Also the registry of the debuggers whose anomaly counts the `/training-logs/debug` routes return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from flexinspect.control import messages
from flexinspect.core.errors import TraceError
from flexinspect.records.training_step import TrainingSummary
from flexinspect_hooks.control.step_barrier import StepBarrier

if TYPE_CHECKING:
    from flexinspect.breakpoints.store import BreakpointStore


class Levels(Protocol):
    """How much is recorded. A change applies from the next step on.

    `layers` are those whose activations level extreme stores, in the form of `--layers`. The
    methods raise `UsageError` for an unknown level and for layers that do not exist.
    """

    level: str
    layers: str

    def set_level(self, level: str) -> None: ...
    def set_layers(self, layers: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AnomalyCounts(TrainingSummary):
    """Anomalies that a debugger found since it was last cleared, and its steps by kind of anomaly.

    `debug_history_length` is the number of entries in its history.
    """

    total_anomalies: int = 0
    debug_history_length: int = 0


class AnomalyCounter(Protocol):
    """A debugger that counts anomalies; a control server may set its level if it has `set_level`.

    `counts` is called from the server's thread. `clear` clears the history and counts from 0.
    """

    def counts(self) -> AnomalyCounts: ...
    def clear(self) -> None: ...


DebuggerKind = Literal["training", "diffusion", "general"]

_counters: dict[DebuggerKind, list[AnomalyCounter]] = {}


def register_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Use `counter` for the summaries of a kind of debugger until a newer one is registered."""
    unregister_counter(debugger, counter)
    _counters.setdefault(debugger, []).append(counter)


def unregister_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Remove a counter; the one registered before it, if any, is used again."""
    registered = _counters.get(debugger, [])
    _counters[debugger] = [other for other in registered if other is not counter]


def active_counter(debugger: DebuggerKind) -> AnomalyCounter | None:
    """Return the newest counter of a kind of debugger, None if none is registered."""
    registered = _counters.get(debugger)
    return registered[-1] if registered else None


@dataclass(slots=True)
class ControlTargets:
    """The parts of a process that commands act on; commands to a part that is None are refused.

    `estimate_cost` returns the cost of a restore, fork or edit, and raises `FlexInspectError` if it
    is not possible. It is called from the server's thread while the model may run, so it must not
    change anything. The number of the command is 0 as long as it is not accepted. Whoever sets it
    carries out the commands that `StepBarrier.between_steps` and `StepBarrier.hold` return.
    """

    barrier: StepBarrier
    levels: Levels
    breakpoints: BreakpointStore | None = None
    estimate_cost: Callable[[messages.QueuedRewind], messages.Cost] | None = None


def debug_summary() -> messages.DebugSummaryResponse:
    """Return the anomalies of all debuggers; zeros for a kind that is not registered."""
    training, diffusion, general = map(_counts, get_args(DebuggerKind))
    return messages.DebugSummaryResponse(
        messages.TrainingAnomalySummary(
            total_anomalies=training.total_anomalies,
            debug_history_length=training.debug_history_length,
            total_steps=training.total_steps,
            # This rate counts anomalies; `training_summary` has one that counts steps.
            anomaly_rate=training.total_anomalies / (training.total_steps or 1),
            gradient_explosion_rate=training.as_dict()["gradient_explosion_rate"],
        ),
        messages.AnomalySummary(diffusion.total_anomalies, diffusion.debug_history_length),
        messages.AnomalySummary(general.total_anomalies, general.debug_history_length),
    )


def training_summary() -> messages.TrainingSummaryResponse:
    """Return the anomalies of training."""
    return messages.from_json(messages.TrainingSummaryResponse, _counts("training").as_dict())


def clear() -> None:
    """Clear the history of every registered debugger."""
    for counter in filter(None, map(active_counter, get_args(DebuggerKind))):
        counter.clear()


def set_level(level: str) -> None:
    """Set the level of every registered debugger that has one."""
    for counter in map(active_counter, get_args(DebuggerKind)):
        getattr(counter, "set_level", lambda _: None)(level)


def _counts(debugger: DebuggerKind) -> AnomalyCounts:
    counter = active_counter(debugger)
    return counter.counts() if counter is not None else AnomalyCounts()


class FindingCounter:
    """Counts the findings and steps of a trace, read on request; `clear` restarts from 0."""

    def __init__(self, trace: str) -> None:
        self._trace = Path(trace)
        self._baseline = AnomalyCounts()

    def counts(self) -> AnomalyCounts:
        """Return findings and steps since the start or the last `clear`."""
        now, before = self._read(), self._baseline
        return AnomalyCounts(
            total_anomalies=max(now.total_anomalies - before.total_anomalies, 0),
            debug_history_length=max(now.debug_history_length - before.debug_history_length, 0),
        )

    def clear(self) -> None:
        """Count from here on; the trace keeps what it has."""
        self._baseline = self._read()

    def _read(self) -> AnomalyCounts:
        # Imported here because it loads numpy, which the user's program may want to load first.
        from flexinspect.trace.queries.search_queries import n_steps_and_findings
        from flexinspect.trace.reader import TraceReader

        try:
            with TraceReader(self._trace) as reader:
                steps, findings = n_steps_and_findings(reader)
        except TraceError:
            return AnomalyCounts()
        return AnomalyCounts(total_anomalies=findings, debug_history_length=steps)
