"""A hit of a breakpoint: what whoever is stopped by it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexinspect.breaks.book import Breakpoint
from flexinspect.breaks.evaluate import Verdict, layer_seen
from flexinspect.breaks.facts import Facts
from flexinspect.breaks.reasons import reason


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
    is_inside: bool = False

    def sentence(self) -> str:
        """Return the hit as one sentence."""
        return f"Breakpoint {self.id}, {self.reason}."

    def as_facts(self) -> dict[str, Any]:
        """Return it as the data of an event."""
        return {
            "breakpoint": self.id,
            "condition": self.condition,
            "layer": self.layer,
            "values": dict(self.values),
        }


def hit_of(met: Breakpoint, facts: Facts, verdict: Verdict, *, inside: bool) -> BreakpointHit:
    """Return the hit of a breakpoint that holds under these facts."""
    values = facts.values
    layer = verdict.layer
    own = facts.layers.get(layer, {}) if layer is not None else {}
    if layer is None:
        layer = layer_seen(met.expression, facts)
    return BreakpointHit(
        id=met.id,
        condition=met.text,
        reason=reason(met.expression, facts, verdict),
        generation=int(values.get("generation", 0)),
        branch=int(values.get("branch", 0)),
        step=int(values["step"]) if "step" in values else None,
        layer=layer,
        values={**values, **own},
        is_inside=inside,
    )
