"""The breakpoints of a run: options such as `[hits=3 once log]`, hits, and the store."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field, structs
from msgspec.structs import replace

from flexinspect.breakpoints import evaluation, grammar
from flexinspect.breakpoints.evaluation import EvaluationResult, StepObservations
from flexinspect.control.messages import BreakpointInfo
from flexinspect.core.text import did_you_mean

_BRACKETS = re.compile(r"(?:^|\s)\[([^\[\]\"']*)\]\s*$")
_OPTION = re.compile(r"[^\s,]+")


_SWITCHES = {"once": ("once", True), "log": ("log_only", True), "off": ("is_enabled", False)}
"""The field of `BreakpointInfo` that each option without a number sets, and its value."""


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split an expression and its options, as fields of `BreakpointInfo`.

    Raises `ExpressionError`.
    """
    brackets = _BRACKETS.search(text)
    if brackets is None:
        return text, {}
    options: dict[str, Any] = {}
    for word in _OPTION.finditer(brackets[1]):
        place = brackets.start(1) + word.start(), brackets.start(1) + word.end()
        name, equals, number = word[0].partition("=")
        if not equals and name in _SWITCHES:
            field_name, options[field_name] = _SWITCHES[name]
        elif not equals or name not in ("hits", "ignore"):
            reason = f"{word[0]} is not an option of a breakpoint."
            known = (known.rstrip("=") for known in grammar.OPTION_HELP)
            hint = did_you_mean(name, known, "The options are hits=N, ignore=N, once, log, off.")
            raise grammar.ExpressionError(reason, text, *place, hint=hint)
        elif not re.fullmatch("[0-9]{1,9}", number):
            reason, hint = "A number is expected after =.", "For example hits=3."
            raise grammar.ExpressionError(reason, text, *place, hint=hint)
        else:
            options["hits"] = int(number) + (name == "ignore")
    return text[: brackets.start()], options


class BreakpointHit(Struct, frozen=True):
    """A hit of a breakpoint.

    `reason` describes condition, step, layer, values and token. `step` is None for a hit between
    steps, `layer` for a condition that is not about a layer. `values` holds all known values of the
    step and of that layer, by name. `is_in_forward`: the forward is still running.
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
        """Return the hit as the data of an event."""
        place = {"breakpoint": self.id, "condition": self.condition, "layer": self.layer}
        return {**place, "values": dict(self.values)}


def make_hit(
    met: Breakpoint, observations: StepObservations, result: EvaluationResult, *, in_forward: bool
) -> BreakpointHit:
    """Return the hit of a breakpoint whose condition holds for these observations."""
    values, layer = observations.values, result.layer
    if layer is None:
        layer = evaluation.observed_layer(met.expression, observations)
    return BreakpointHit(
        id=met.info.id,
        condition=met.info.text,
        reason=evaluation.hit_reason(met.expression, observations, result),
        generation=int(values.get("generation", 0)),
        branch=int(values.get("branch", 0)),
        step=int(values["step"]) if "step" in values else None,
        layer=layer,
        values=observations.values_at(result.layer),
        is_in_forward=in_forward,
    )


class HitAction(StrEnum):
    """What to do at a hit."""

    STOP = "stop"
    LOG = "log"
    PASS = "pass"


class Breakpoint(Struct, frozen=True):
    """A breakpoint: as clients see it, its condition, and when it was last enabled or disabled."""

    info: BreakpointInfo
    expression: grammar.Expression
    enabled_at: float = 0.0


class BreakpointStore:
    """All breakpoints of a run. Thread-safe.

    `version` changes with the set of enabled breakpoints, so that one comparison per step tells
    whether anything has changed; it is 0 until a breakpoint is added. `finding_ids` returns the ids
    that a `finding` condition is checked against; if it returns none, any id is accepted.
    `on_change` is called after each change by `add`, `remove` or `enable`, in the same thread.
    """

    def __init__(self, *, finding_ids: Callable[[], Collection[str]] | None = None) -> None:
        self._breakpoints: dict[int, Breakpoint] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._finding_ids = finding_ids
        self.on_change: Callable[[], None] = lambda: None
        self.version = 0

    def add(
        self, text: str, *, hits: int = 0, once: bool = False, log_only: bool = False
    ) -> BreakpointInfo:
        """Add a breakpoint. `text` may end with options in brackets, combined with the arguments.

        Raises `ExpressionError`, which points at the invalid part.
        """
        condition, written = split_options(text)
        expression = grammar.parse(condition)
        if self._finding_ids is not None and grammar.has_finding(expression):
            grammar.parse(condition, finding_ids=self._finding_ids() or None)
        options = {"once": once, "log_only": log_only, **written}
        options["hits"] = max(written.get("hits", 0), hits)
        text, note = grammar.to_text(expression), _evaluation_note(expression)
        info = BreakpointInfo(next(self._numbers), text, note=note, **options)
        with self._lock:
            self._breakpoints[info.id] = Breakpoint(info, expression, time.time())
            self.version += 1
        self.on_change()
        return info

    def list(self) -> tuple[BreakpointInfo, ...]:
        """Return all breakpoints in the order in which they were added."""
        with self._lock:
            return tuple(stored.info for stored in self._breakpoints.values())

    def remove(self, number: int) -> None:
        """Remove a breakpoint. Raises `KeyError` for an unknown number."""
        with self._lock:
            del self._breakpoints[number]
            self.version += 1
        self.on_change()

    def enable(self, number: int, on: bool) -> BreakpointInfo:
        """Enable or disable a breakpoint. Raises `KeyError` for an unknown number."""
        with self._lock:
            info = self._change(number, is_enabled=on)
        self.on_change()
        return info

    def set_note(self, number: int, note: str) -> None:
        """Set the remark that lists show for a breakpoint, if it exists."""
        with self._lock:
            if number in self._breakpoints:
                self._change(number, note=note)

    def enabled(self) -> tuple[Breakpoint, ...]:
        """Return the enabled breakpoints."""
        with self._lock:
            return tuple(stored for stored in self._breakpoints.values() if stored.info.is_enabled)

    def record_hit(self, number: int) -> HitAction:
        """Count a hit and return what to do.

        A `once` breakpoint is disabled. `on_change` is not called for that: the caller has to stop
        first, as disarming before would let the next step start.
        """
        with self._lock:
            stored = self._breakpoints.get(number)
            if stored is None or not stored.info.is_enabled:
                return HitAction.PASS
            info = self._change(number, n_hits=stored.info.n_hits + 1)
            if info.n_hits < info.hits:
                return HitAction.PASS
            if info.once:
                self._change(number, is_enabled=False)
        return HitAction.LOG if info.log_only else HitAction.STOP

    def _change(self, number: int, **changes: Any) -> BreakpointInfo:
        stored, is_switched = self._breakpoints[number], "is_enabled" in changes
        info = structs.replace(stored.info, **changes)
        enabled_at = time.time() if is_switched else stored.enabled_at
        self._breakpoints[number] = replace(stored, info=info, enabled_at=enabled_at)
        self.version += is_switched
        return info


def _evaluation_note(expression: grammar.Expression) -> str:
    observations = grammar.observations_in(expression)
    if any(one.is_checked_by_name for one in observations):
        return "evaluated at each of these modules, and after each step"
    if grammar.needs_calls(expression):
        return "evaluated at each attention call, and after each step"
    return "evaluated after each step"
