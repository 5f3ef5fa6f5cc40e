"""Places of a trace: which ones there are, and which one comes next."""

from __future__ import annotations

from dataclasses import replace

from flexinspect.feed import RunStatus
from flexinspect.panels.base import TracePlace


def clamp_place(place: TracePlace, status: RunStatus) -> TracePlace:
    """Return the nearest place that the trace has: its step, layer and head."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    last = status.last_step
    step = max(place.step, 0) if last is None else min(max(place.step, status.first_step), last)
    return replace(
        place,
        step=step,
        layer=_clamp_index(place.layer, model.get("layers")),
        head=_clamp_index(place.head, model.get("heads")),
    )


def extrapolate_place(old: TracePlace, new: TracePlace) -> TracePlace | None:
    """Return the place after `new` if the user goes on as from `old`; None if that is unknown."""
    if (old.generation, old.branch) != (new.generation, new.branch):
        return None
    return replace(
        new,
        step=2 * new.step - old.step,
        layer=2 * new.layer - old.layer,
        head=2 * new.head - old.head,
    )


def _clamp_index(value: int, count: object) -> int:
    return max(0, min(value, count - 1)) if isinstance(count, int) and count > 0 else max(value, 0)
