"""The breakpoints of a run: options such as `[hits=3 once log]`, hits, and the store."""

from __future__ import annotations

import difflib
import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from flexinspect.breakpoints.evaluation import (
    EvaluationResult,
    StepObservations,
    hit_reason,
    observed_layer,
)
from flexinspect.breakpoints.grammar import parse
from flexinspect.breakpoints.names import INF, NAN, OPTION_HELP
from flexinspect.breakpoints.syntax_tree import (
    Expression,
    ExpressionError,
    has_finding,
    needs_calls,
    observations_in,
    to_text,
)
from flexinspect.control.messages import BreakpointInfo

_BRACKETS = re.compile(r"(?:^|\s)\[([^\[\]\"']*)\]\s*$")
_OPTION = re.compile(r"[^\s,]+")
_MAX_HITS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BreakpointOptions:
    """How a breakpoint stops: at every hit from number `hits` on (0 and 1: the first).

    `once` disables it after its first stop, `log` records an event instead of stopping, and `off`
    adds it disabled.
    """

    hits: int = 0
    once: bool = False
    log: bool = False
    off: bool = False

    def to_text(self) -> str:
        """Return the options in brackets, empty without options."""
        parts = [f"hits={self.hits}"] if self.hits > 1 else []
        parts += [name for name in ("once", "log", "off") if getattr(self, name)]
        return f"[{' '.join(parts)}]" if parts else ""


def split_options(text: str) -> tuple[str, BreakpointOptions]:
    """Split an expression and its options. Raises `ExpressionError`."""
    brackets = _BRACKETS.search(text)
    if brackets is None:
        return text, BreakpointOptions()
    hits, switches = 0, set()
    for word in _OPTION.finditer(brackets[1]):
        start = brackets.start(1) + word.start()
        name, equals, number = word[0].partition("=")
        if not equals and name in ("once", "log", "off"):
            switches.add(name)
        elif equals and name in ("hits", "ignore"):
            hits = _parse_hits(text, start, word[0], number) + (name == "ignore")
        else:
            raise _unknown_option(text, start, word[0])
    flags = {name: name in switches for name in ("once", "log", "off")}
    return text[: brackets.start()], BreakpointOptions(hits, **flags)


def _parse_hits(text: str, start: int, word: str, number: str) -> int:
    if number.isascii() and number.isdigit() and len(number) < 10 and int(number) < _MAX_HITS:
        return int(number)
    raise ExpressionError(
        "A number is expected after =.", text, start, start + len(word), hint="For example hits=3."
    )


def _unknown_option(text: str, start: int, word: str) -> ExpressionError:
    known = [name.rstrip("=") for name in OPTION_HELP]
    near = difflib.get_close_matches(word.partition("=")[0], known, 1)
    hint = (
        f"Did you mean {near[0]}?" if near else "The options are hits=N, ignore=N, once, log, off."
    )
    return ExpressionError(
        f"{word} is not an option of a breakpoint.", text, start, start + len(word), hint=hint
    )


@dataclass(frozen=True, slots=True)
class BreakpointHit:
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
        return {
            "breakpoint": self.id,
            "condition": self.condition,
            "layer": self.layer,
            "values": dict(self.values),
        }


def make_hit(
    breakpoint_: Breakpoint,
    observations: StepObservations,
    result: EvaluationResult,
    *,
    in_forward: bool,
) -> BreakpointHit:
    """Return the hit of a breakpoint whose condition holds for these observations."""
    values = observations.values
    layer = result.layer
    layer_values = observations.layers.get(layer, {}) if layer is not None else {}
    if layer is None:
        layer = observed_layer(breakpoint_.expression, observations)
    return BreakpointHit(
        id=breakpoint_.id,
        condition=breakpoint_.text,
        reason=hit_reason(breakpoint_.expression, observations, result),
        generation=int(values.get("generation", 0)),
        branch=int(values.get("branch", 0)),
        step=int(values["step"]) if "step" in values else None,
        layer=layer,
        values={**values, **layer_values},
        is_in_forward=in_forward,
    )


class HitAction(StrEnum):
    """What to do at a hit."""

    STOP = "stop"
    LOG = "log"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A breakpoint. `source` is where it was added (such as `--break`), `note` a remark.

    `enabled_at` is when it was last enabled or disabled, in seconds since the epoch.
    """

    id: int
    expression: Expression
    options: BreakpointOptions
    is_enabled: bool = True
    n_hits: int = 0
    source: str = ""
    note: str = ""
    enabled_at: float = 0.0

    @property
    def text(self) -> str:
        """The condition as text."""
        return to_text(self.expression)

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"Breakpoint {self.id}"

    def info(self) -> BreakpointInfo:
        """Return the breakpoint as a message for clients."""
        options = self.options
        return BreakpointInfo(
            id=self.id,
            text=self.text,
            is_enabled=self.is_enabled,
            hits=options.hits,
            once=options.once,
            log_only=options.log,
            n_hits=self.n_hits,
            note=self.note or _evaluation_note(self.expression),
        )


class BreakpointStore:
    """All breakpoints of a run. Thread-safe.

    `version` changes with the set of enabled breakpoints, so that one comparison per step tells
    whether anything has changed; it is 0 until a breakpoint is added. `finding_ids` returns the ids
    that a `finding` condition is checked against; if it returns none, any id is accepted.
    `on_change` is called after each change by `add`, `remove` or `enable`, in the same thread.
    """

    def __init__(
        self,
        *,
        finding_ids: Callable[[], Collection[str]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._breakpoints: dict[int, Breakpoint] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._finding_ids = finding_ids
        self.on_change = on_change
        self.version = 0

    def add(
        self,
        text: str,
        *,
        hits: int = 0,
        once: bool = False,
        log_only: bool = False,
        source: str = "",
    ) -> BreakpointInfo:
        """Add a breakpoint. `text` may end with options in brackets, combined with the arguments.

        Raises `ExpressionError`, which points at the invalid part.
        """
        condition, written = split_options(text)
        expression = parse(condition)
        if self._finding_ids is not None and has_finding(expression):
            parse(condition, finding_ids=self._finding_ids() or None)
        options = BreakpointOptions(
            hits=max(written.hits, hits),
            once=written.once or once,
            log=written.log or log_only,
            off=written.off,
        )
        with self._lock:
            added = Breakpoint(
                id=next(self._numbers),
                expression=expression,
                options=options,
                is_enabled=not options.off,
                source=source,
                enabled_at=time.time(),
            )
            self._store(added)
        self.on_change()
        return added.info()

    def list(self) -> tuple[BreakpointInfo, ...]:
        """Return all breakpoints in the order in which they were added."""
        with self._lock:
            return tuple(stored.info() for stored in self._breakpoints.values())

    def remove(self, number: int) -> None:
        """Remove a breakpoint. Raises `KeyError` for an unknown number."""
        with self._lock:
            del self._breakpoints[number]
            self.version += 1
        self.on_change()

    def enable(self, number: int, on: bool) -> BreakpointInfo:
        """Enable or disable a breakpoint. Raises `KeyError` for an unknown number."""
        with self._lock:
            changed = replace(self._breakpoints[number], is_enabled=on, enabled_at=time.time())
            self._store(changed)
        self.on_change()
        return changed.info()

    def set_note(self, number: int, note: str) -> None:
        """Set the remark that lists show for a breakpoint, if it exists."""
        with self._lock:
            if number in self._breakpoints:
                self._breakpoints[number] = replace(self._breakpoints[number], note=note)

    def enabled(self) -> tuple[Breakpoint, ...]:
        """Return the enabled breakpoints."""
        with self._lock:
            return tuple(stored for stored in self._breakpoints.values() if stored.is_enabled)

    def record_hit(self, number: int) -> HitAction:
        """Count a hit and return what to do.

        A `once` breakpoint is disabled. `on_change` is not called for that: the caller has to stop
        first, as disarming before would let the next step start.
        """
        with self._lock:
            stored = self._breakpoints.get(number)
            if stored is None or not stored.is_enabled:
                return HitAction.PASS
            stored = self._breakpoints[number] = replace(stored, n_hits=stored.n_hits + 1)
            if stored.n_hits < stored.options.hits:
                return HitAction.PASS
            if stored.options.once:
                self._store(replace(stored, is_enabled=False))
        return HitAction.LOG if stored.options.log else HitAction.STOP

    def _store(self, changed: Breakpoint) -> None:
        self._breakpoints[changed.id] = changed
        self.version += 1


def _evaluation_note(expression: Expression) -> str:
    """Return where an expression is evaluated."""
    if any(
        condition.module_pattern is not None and condition.kind in (NAN, INF)
        for condition in observations_in(expression)
    ):
        return "evaluated at each of these modules, and after each step"
    if needs_calls(expression):
        return "evaluated at each attention call, and after each step"
    return "evaluated after each step"
