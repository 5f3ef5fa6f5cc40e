"""What a capture session does between two steps: it passes the gate, and changes its level."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexinspect.control.messages import StepRef
from flexinspect.errors import ControlError
from flexinspect.records import EventRecord
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.control.gate import StepBarrier
from flexinspect_hooks.hook import CaptureContext

LEVEL_EVENT = "level"
"""The event of another level, or other layers."""


def pass_barrier(barrier: StepBarrier | None, place: StepRef) -> float:
    """Wait until the next forward may start; returns the seconds that it took.

    Raises `KeyboardInterrupt` when the run is to stop.
    """
    if barrier is None:
        return 0.0
    started = time.perf_counter()
    while (order := barrier.between_steps(place)) is not None:
        barrier.report_result(order, ControlError("This loop cannot be put back to another step."))
    return time.perf_counter() - started


class PendingLevels:
    """A level or layers that were asked for from another thread, for the next step that opens."""

    def __init__(self) -> None:
        self._requested: tuple[str | None, Sequence[int] | None] | None = None

    def request(self, *, level: str | None = None, layers: Sequence[int] | None = None) -> None:
        """Ask for another level, or other layers, or both."""
        before_level, before_layers = self._requested or (None, None)
        self._requested = (level or before_level, before_layers if layers is None else layers)

    def apply(self, step: StepContext, context: CaptureContext) -> str:
        """Let a step that opens be recorded as asked for, and say so in it; returns its level."""
        wanted, self._requested = self._requested, None
        level, layers = wanted or (None, None)
        if level is not None and level != step.level:
            facts = {"level": level, "before": step.level}
            text = f"level {level} from step {step.step} on, {step.level} before"
            step.events.append((LEVEL_EVENT, text, facts))
            step.level = level
        if layers is not None and tuple(layers) != context.layers:
            context.layers = tuple(layers)
            text = f"activations of {len(layers)} layers are stored from step {step.step} on"
            step.events.append((LEVEL_EVENT, text, {"layers": list(layers)}))
        return step.level


def level_events(step: StepContext) -> list[EventRecord]:
    """Return the changes of a step's level and layers, for a step that is never written itself."""
    place = (time.time(), step.generation, step.step)
    return [
        EventRecord(kind, text, *place, *facts)
        for kind, text, *facts in step.events
        if kind == LEVEL_EVENT
    ]
