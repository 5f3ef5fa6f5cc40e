"""How the gate stands: where it is to pause and why, and that in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flexinspect.control.messages import PAUSE_REQUESTED, RewindState, State, StepRef

STOPPING: Final = "stopping after this step"

_STATE_TEXTS: Mapping[State, str] = {
    "loading": "loading",
    "running": "running",
    "pausing": "pausing after this step",
    "holding": "the generation is over, and the model is kept alive",
    "finished": "the run is over",
}


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A pause that is wanted or reached, and why; `reached` is called when it is."""

    reason: str
    kind: Literal["paused", "breakpoint"] = "paused"
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_paused: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """How the gate stands at one moment, as `Status` says it."""

    state: State
    place: StepRef
    description: str
    reason: str
    until: str
    last_rewind: RewindState | None


@dataclass(slots=True)
class PauseTarget:
    """Where to pause: after so many steps, or after one step of one generation."""

    steps_left: int | None = None
    generation: int = 0
    step: int = 0

    def describe(self) -> str:
        if self.steps_left is not None:
            return f"after {self.steps_left} more step{'s' if self.steps_left > 1 else ''}"
        of = f" of generation {self.generation}" if self.generation else ""
        return f"after step {self.step}{of}"

    def reason_to_pause(self, place: StepRef) -> str | None:
        """Return why to pause at a place that was just reached, None to go on."""
        if self.steps_left is not None:
            self.steps_left -= place.step >= 0
            return None if self.steps_left else PAUSE_REQUESTED
        if place.generation > self.generation:
            return f"generation {self.generation} ended before step {self.step}"
        is_there = place.generation == self.generation and place.step >= self.step
        return PAUSE_REQUESTED if is_there else None


def describe_state(
    state: State, place: StepRef, until: str, *, is_stopping: bool, active_rewind: str
) -> str:
    """Return a state as a sentence.

    `place` is the last finished step, `until` where it will pause, empty when nothing is asked for;
    `at_work_on` is the kind of the order that is being obeyed, if any.
    """
    if is_stopping:
        return STOPPING
    if state == "paused":
        return f"paused {place.describe_after()}"
    if state == "loading" and until:
        return f"loading, and pausing {until}"
    if state == "running" and until:
        return f"pausing {until}"
    if state == "running" and active_rewind:
        return f"at work on the {active_rewind}"
    return _STATE_TEXTS[state]
