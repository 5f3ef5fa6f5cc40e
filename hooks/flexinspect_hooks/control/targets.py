"""What the control server commands besides the gate: protocols, so that each part stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

from flexinspect.control.messages import (
    AnomalySummary,
    BreakpointInfo,
    Cost,
    DebugSummaryResponse,
    QueuedRewind,
    TrainingAnomalySummary,
    TrainingSummaryResponse,
    from_json,
)
from flexinspect.core.errors import TraceError
from flexinspect.records.training_step import TrainingSummary
from flexinspect_hooks.control.step_barrier import StepBarrier


class Levels(Protocol):
    """How much is recorded. A change counts from the next step on."""

    @property
    def level(self) -> str:
        """One of basic, advanced and extreme."""
        ...

    @property
    def layers(self) -> str:
        """The layers whose activations level extreme stores, as `--layers` takes them."""
        ...

    def set_level(self, level: str) -> None:
        """Raises `UsageError` for an unknown one."""
        ...

    def set_layers(self, layers: str) -> None:
        """Take "0,3,5-7" or "all". Raises `UsageError` for layers that are not there."""
        ...


class BreakpointControl(Protocol):
    """The breakpoints of a run. Methods are called from the server's thread."""

    def add(
        self, text: str, *, hits: int = 0, once: bool = False, log_only: bool = False
    ) -> BreakpointInfo:
        """Set a breakpoint. Raises `FlexInspectError` for a condition that cannot be read."""
        ...

    def list(self) -> Sequence[BreakpointInfo]:
        """Return all of them, in order of setting."""
        ...

    def remove(self, number: int) -> None:
        """Raises `KeyError` for a number that none has."""
        ...

    def enable(self, number: int, on: bool) -> BreakpointInfo:
        """Switch one on or off. Raises `KeyError` for a number that none has."""
        ...


class RewindTarget(Protocol):
    """What obeys restore, fork and edit: it looks at an order here, and the engine carries it out.

    The order itself is handed to the engine by `Gate.between_steps` or `Gate.hold`, in the model's
    thread, and its result told through `Gate.done`.
    """

    def estimate_cost(self, order: QueuedRewind) -> Cost:
        """Say what an order would cost. Raises `FlexInspectError` saying why it cannot be obeyed.

        Called from the server's thread while the model may run: it only looks. The order's number
        is 0 when it is not accepted yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class AnomalyCounts(TrainingSummary):
    """What a debugger has met since it was last cleared: anomalies, and steps of it in all kinds.

    `debug_history_length` is over how much it has looked.
    """

    total_anomalies: int = 0
    debug_history_length: int = 0


class AnomalyCounter(Protocol):
    """A debugger that counts anomalies: training, diffusion, or the general one."""

    def counts(self) -> AnomalyCounts:
        """Return the counts. Called from the server's thread."""
        ...

    def clear(self) -> None:
        """Forget the history and start counting from 0."""
        ...


@runtime_checkable
class SupportsLevel(Protocol):
    """A debugger whose level can be set from outside too."""

    def set_level(self, level: str) -> None:
        """Look at as much as `level` says, from the next step on."""
        ...


DebuggerKind = Literal["training", "diffusion", "general"]

_providers: dict[DebuggerKind, list[AnomalyCounter]] = {}


def register_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Let the summaries of this process come from here; the newest provider of a name counts."""
    unregister_counter(debugger, counter)
    _providers.setdefault(debugger, []).append(counter)


def unregister_counter(debugger: DebuggerKind, counter: AnomalyCounter) -> None:
    """Take a provider back; if it is the one that counts, the one before it counts again."""
    held = _providers.get(debugger, [])
    _providers[debugger] = [each for each in held if each is not counter]


def active_counter(debugger: DebuggerKind) -> AnomalyCounter | None:
    """Return who counts for a debugger, None when nobody does."""
    held = _providers.get(debugger)
    return held[-1] if held else None


@dataclass(slots=True)
class ControlTargets:
    """All that is commanded in one process; a part that is None is refused with a sentence."""

    barrier: StepBarrier
    levels: Levels
    breakpoints: BreakpointControl | None = None
    rewind_target: RewindTarget | None = None


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


class FindingCounter:
    """Counts a trace's findings and steps, read when somebody asks; `clear` counts from there."""

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
        # Here, as it loads numpy: whoever runs the user's program must not load that first.
        from flexinspect.trace.queries.search_queries import n_steps_and_findings
        from flexinspect.trace.reader import TraceReader

        try:
            with TraceReader(self._trace) as reader:
                steps, findings = n_steps_and_findings(reader)
        except TraceError:
            return AnomalyCounts()
        return AnomalyCounts(total_anomalies=findings, debug_history_length=steps)
