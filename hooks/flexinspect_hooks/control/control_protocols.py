"""What the control server acts on besides the step barrier: levels, and counters of anomalies.

The `/training-logs/debug` routes return the counts of the debuggers that are registered here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from msgspec import Struct, field
from msgspec.structs import asdict

from flexinspect.control import messages
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.records.job import parse_layers
from flexinspect.records.step import LEVELS
from flexinspect.records.training_step import TrainingSummary
from flexinspect_hooks.control.step_barrier import StepBarrier

if TYPE_CHECKING:
    from flexinspect.breakpoints.store import BreakpointStore

_MAX_LAYERS = 1 << 20


class SessionLevels:
    """Level and stored layers (as in `--layers`) of all sessions, which read them at each step."""

    def __init__(self, level: str, layers: str | None = None) -> None:
        self.level, self.layers = level, layers or "all"
        self.request: tuple[str, str | None] = (level, None)
        """The level, and the layers that a command requested; a new tuple for each command."""
        self.known_layers: frozenset[int] = frozenset()
        """The layers of all attached models; if empty, any layer may be chosen."""

    def set_level(self, level: str) -> None:
        """Record at another level from the next step on. Raises `UsageError` for an unknown one."""
        if level not in LEVELS:
            raise UsageError(f"There is no level {level}; there are {', '.join(LEVELS)}.")
        self.level, self.request = level, (level, self.request[1])

    def set_layers(self, layers: str) -> None:
        """Store other layers from the next step on. Raises `UsageError` as `parse_layers` does."""
        parse_layers(layers, max(self.known_layers, default=_MAX_LAYERS - 1) + 1)
        self.layers, self.request = layers, (self.level, layers)


def chosen_layers(layers: str | None, known: Iterable[int]) -> tuple[int, ...]:
    """Return those of a model's `known` layers that `layers` names, in the form of `--layers`."""
    wanted = parse_layers(layers, _MAX_LAYERS)
    return tuple(layer for layer in sorted(set(known)) if wanted is None or layer in wanted)


class ControlTargets(Struct):
    """The parts of a process that commands act on; commands to a part that is None are refused.

    `kind`, `title` and `trace` are fields of `StatusResponse`. `estimate_cost` returns the cost of
    a restore, fork or edit, and raises `FlexInspectError` if it is not possible. The server's
    thread calls it while the model may run, so it must not change anything. The code that sets it
    also executes the commands that `StepBarrier.between_steps` and `StepBarrier.hold` return.
    """

    kind: messages.Kind
    title: str
    trace: str
    levels: SessionLevels
    barrier: StepBarrier = field(default_factory=StepBarrier)
    breakpoints: BreakpointStore | None = None
    estimate_cost: Callable[[messages.RewindCommand], messages.Cost] | None = None


class AnomalyCounts(TrainingSummary, frozen=True):
    """Anomalies and steps since a debugger was last cleared, and the length of its history."""

    total_anomalies: int = 0
    debug_history_length: int = 0


class AnomalyCounter(Protocol):
    """A debugger that counts anomalies. The server's thread calls `counts`; `clear` begins at 0."""

    def counts(self) -> AnomalyCounts: ...
    def clear(self) -> None: ...


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
    for counter in chain(*map(live_counters, get_args(DebuggerKind))):
        counter.clear()


def set_level(level: str) -> None:
    """Set the level of every registered debugger that has one. Raises `UsageError` if unknown."""
    for counter in chain(*map(live_counters, get_args(DebuggerKind))):
        if hasattr(counter, "level"):
            counter.level = level


def _counts(debugger: DebuggerKind) -> AnomalyCounts:
    counters = live_counters(debugger)
    return counters[-1].counts() if counters else AnomalyCounts()


class BaselineCounter:
    """Counts from its start, or from the last `clear`, on."""

    def __init__(self) -> None:
        self._baseline = AnomalyCounts()

    def _read(self) -> AnomalyCounts:
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
