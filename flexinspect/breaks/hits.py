"""A hit of a breakpoint: what whoever is stopped by it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexinspect.breaks.book import Breakpoint
from flexinspect.breaks.evaluate import EvaluationResult, observed_layer
from flexinspect.breaks.facts import StepObservations
from flexinspect.breaks.reasons import hit_reason


@dataclass(frozen=True, slots=True)
class BreakpointHit:
    """Which breakpoint was met, where, and why.

    `reason` names condition, step, layer, values and token in words. `step` is None where it was
    met between steps, `layer` where it is about none. `values` are all that was known of the step
    and of that layer, by the names of the language. `is_inside` says that the forward still runs.
    """

    id: int
    condition: str
    reason: str
    generation: int = 0
    branch: int = 0
    step: int | None = None
    layer: int | None = None
    values: Mapping[str, float | str] = field(default_factory=dict)
    is_in_forward: bool = False

    def sentence(self) -> str:
        """Return the hit as one sentence."""
        return f"Breakpoint {self.id}, {self.reason}."

    def event_data(self) -> dict[str, Any]:
        """Return it as the data of an event."""
        return {
            "breakpoint": self.id,
            "condition": self.condition,
            "layer": self.layer,
            "values": dict(self.values),
        }


def make_hit(
    met: Breakpoint, observations: StepObservations, result: EvaluationResult, *, in_forward: bool
) -> BreakpointHit:
    """Return the hit of a breakpoint that holds under these facts."""
    values = observations.values
    layer = result.layer
    own = observations.layers.get(layer, {}) if layer is not None else {}
    if layer is None:
        layer = observed_layer(met.expression, observations)
    return BreakpointHit(
        id=met.id,
        condition=met.text,
        reason=hit_reason(met.expression, observations, result),
        generation=int(values.get("generation", 0)),
        branch=int(values.get("branch", 0)),
        step=int(values["step"]) if "step" in values else None,
        layer=layer,
        values={**values, **own},
        is_in_forward=in_forward,
    )
