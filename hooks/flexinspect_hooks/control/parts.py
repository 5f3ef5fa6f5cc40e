"""What the control server commands besides the gate: protocols, so that each part stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from flexinspect.control.messages import BreakpointInfo, Cost, QueuedRewind
from flexinspect.trainingfacts import TrainingSummary
from flexinspect_hooks.control.gate import StepBarrier


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
