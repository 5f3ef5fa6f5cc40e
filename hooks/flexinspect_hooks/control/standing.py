"""How the gate stands: where it is to pause and why, and that in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flexinspect.control.messages import ASKED, OrderState, Place, State

STOPPING: Final = "stopping after this step"

_SAYS: Mapping[State, str] = {
    "loading": "loading",
    "running": "running",
    "pausing": "pausing after this step",
    "holding": "the generation is over, and the model is kept alive",
    "finished": "the run is over",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """A pause that is wanted or reached, and why; `reached` is called when it is."""

    reason: str
    kind: Literal["paused", "breakpoint"] = "paused"
    facts: Mapping[str, Any] = field(default_factory=dict)
    reached: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class GateView:
    """How the gate stands at one moment, as `Status` says it."""

    state: State
    place: Place
    says: str
    reason: str
    until: str
    order: OrderState | None


@dataclass(slots=True)
class Target:
    """Where to pause: after so many steps, or after one step of one generation."""

    left: int | None = None
    generation: int = 0
    step: int = 0

    def words(self) -> str:
        if self.left is not None:
            return f"after {self.left} more step{'s' if self.left > 1 else ''}"
        of = f" of generation {self.generation}" if self.generation else ""
        return f"after step {self.step}{of}"

    def reached(self, place: Place) -> str | None:
        """Return why to pause at a place that was just reached, None to go on."""
        if self.left is not None:
            self.left -= place.step >= 0
            return None if self.left else ASKED
        if place.generation > self.generation:
            return f"generation {self.generation} ended before step {self.step}"
        is_there = place.generation == self.generation and place.step >= self.step
        return ASKED if is_there else None


def says(state: State, place: Place, until: str, *, is_stopping: bool, at_work_on: str) -> str:
    """Return a state as a sentence.

    `place` is the last finished step, `until` where it will pause, empty when nothing is asked for;
    `at_work_on` is the kind of the order that is being obeyed, if any.
    """
    if is_stopping:
        return STOPPING
    if state == "paused":
        return f"paused {place.after()}"
    if state == "loading" and until:
        return f"loading, and pausing {until}"
    if state == "running" and until:
        return f"pausing {until}"
    if state == "running" and at_work_on:
        return f"at work on the {at_work_on}"
    return _SAYS[state]
