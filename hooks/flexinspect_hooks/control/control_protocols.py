"""The parts of a capture that the control server uses besides the step barrier, as protocols.

Also the registry of the debuggers whose anomaly counts the `/training-logs/debug` routes return.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from msgspec import Struct
from msgspec.structs import asdict

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


class AnomalyCounts(TrainingSummary, frozen=True):
    """Anomalies that a debugger found since it was last cleared, and its steps by kind of anomaly.

    `debug_history_length` is the number of entries in its history.
    """

    total_anomalies: int = 0
    debug_history_length: int = 0


class AnomalyCounter(Protocol):
    """A debugger that counts anomalies: training, diffusion, or the general one.

    `counts` is called from the server's thread. `clear` clears the history and counts from 0.
    """

    def counts(self) -> AnomalyCounts: ...
    def clear(self) -> None: ...


@runtime_checkable
class HasLevel(Protocol):
    """A debugger whose level the control server can set; it applies from the next step on."""

    level: str


DebuggerKind = Literal["training", "diffusion", "general"]

_counters: dict[DebuggerKind, list[weakref.ref[AnomalyCounter]]] = {}


def register_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Use `counter`, held weakly, for the summaries of a kind until a newer one is registered."""
    unregister_counter(debugger, counter)
    _counters.setdefault(debugger, []).append(weakref.ref(counter))


def unregister_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Remove a counter; the one registered before it, if any, is used again."""
    others = [one for one in live_counters(debugger) if one is not counter]
    _counters[debugger] = [weakref.ref(one) for one in others]


def live_counters(debugger: DebuggerKind) -> list[AnomalyCounter]:
    """Return the counters of a kind of debugger that still exist, the newest last."""
    return [one for each in _counters.get(debugger, ()) if (one := each()) is not None]


class ControlTargets(Struct):
    """The parts of a process that commands act on; commands to a part that is None are refused.

    `estimate_cost` returns the cost of a restore, fork or edit, and raises `FlexInspectError` if it
    is not possible. The server's thread calls it while the model may run, so it must not change
    anything. A command has the number 0 until it is accepted. The code that sets `estimate_cost`
    also executes the commands that `StepBarrier.between_steps` and `StepBarrier.hold` return.
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
    for debugger in get_args(DebuggerKind):
        for counter in live_counters(debugger):
            counter.clear()


def set_level(level: str) -> None:
    """Set the level of every registered debugger that has one. Raises `UsageError` if unknown."""
    for debugger in get_args(DebuggerKind):
        for counter in live_counters(debugger):
            if isinstance(counter, HasLevel):
                counter.level = level


def _counts(debugger: DebuggerKind) -> AnomalyCounts:
    counters = live_counters(debugger)
    return counters[-1].counts() if counters else AnomalyCounts()


class BaselineCounter:
    """Counts from its start, or from the last `clear`, on."""

    def __init__(self) -> None:
        self._baseline = AnomalyCounts()

    def _read(self) -> AnomalyCounts:
        """Return all that was ever counted."""
        raise NotImplementedError

    def counts(self) -> AnomalyCounts:
        """Return the counts since the start or the last `clear`."""
        now, before = asdict(self._read()), asdict(self._baseline)
        return AnomalyCounts(**{name: max(now[name] - before[name], 0) for name in now})

    def clear(self) -> None:
        """Count from here on; the trace keeps what it has."""
        self._baseline = self._read()


class FindingCounter(BaselineCounter):
    """Counts the findings and steps of a trace, read on request."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self._trace = Path(trace)

    def _read(self) -> AnomalyCounts:
        # Imported here because it loads numpy, which the user's program may want to load first.
        from flexinspect.trace.queries import n_steps_and_findings
        from flexinspect.trace.reader import TraceReader

        try:
            with TraceReader(self._trace) as reader:
                steps, findings = n_steps_and_findings(reader)
        except TraceError:
            return AnomalyCounts()
        return AnomalyCounts(total_anomalies=findings, debug_history_length=steps)
