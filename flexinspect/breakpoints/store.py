"""What is written in brackets after an expression: `[hits=3 once log off]`."""

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
    """How a breakpoint stops: from the hit `hits` on (0 and 1: the first), then always.

    `once` switches it off after its first stop, `log` records an event in place of a stop, and
    `off` begins switched off.
    """

    hits: int = 0
    once: bool = False
    log: bool = False
    off: bool = False

    def to_text(self) -> str:
        """Return them as they are written, empty for none."""
        said = [f"hits={self.hits}"] if self.hits > 1 else []
        said += [name for name in ("once", "log", "off") if getattr(self, name)]
        return f"[{' '.join(said)}]" if said else ""


def split_options(text: str) -> tuple[str, BreakpointOptions]:
    """Return an expression without its options, and these. Raises `ExpressionError`."""
    found = _BRACKETS.search(text)
    if found is None:
        return text, BreakpointOptions()
    hits, switches = 0, set()
    for word in _OPTION.finditer(found[1]):
        start = found.start(1) + word.start()
        name, equals, number = word[0].partition("=")
        if not equals and name in ("once", "log", "off"):
            switches.add(name)
        elif equals and name in ("hits", "ignore"):
            hits = _parse_hits(text, start, word[0], number) + (name == "ignore")
        else:
            raise _unknown_option(text, start, word[0])
    given = {name: name in switches for name in ("once", "log", "off")}
    return text[: found.start()], BreakpointOptions(hits, **given)


def _parse_hits(text: str, start: int, word: str, number: str) -> int:
    if number.isascii() and number.isdigit() and len(number) < 10 and int(number) < _MAX_HITS:
        return int(number)
    raise ExpressionError(
        "After = stands a whole number.", text, start, start + len(word), hint="As in hits=3."
    )


def _unknown_option(text: str, start: int, word: str) -> ExpressionError:
    known = [name.rstrip("=") for name in OPTION_HELP]
    near = difflib.get_close_matches(word.partition("=")[0], known, 1)
    hint = f"Did you mean {near[0]}?" if near else "Known are hits=N, ignore=N, once, log, off."
    return ExpressionError(
        f"{word} is no option of a breakpoint.", text, start, start + len(word), hint=hint
    )


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


class HitAction(StrEnum):
    """What a hit means."""

    STOP = "stop"
    LOG = "log"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """One breakpoint as it stands. `source` says who set it; `note` what there is to know of it.

    `since` is when it was last switched on, in seconds since the epoch.
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
        """The condition, as it is written again."""
        return to_text(self.expression)

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return f"Breakpoint {self.id}"

    def info(self) -> BreakpointInfo:
        """Return what is told of it."""
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
    """All breakpoints of a run. Any thread may ask and change it.

    `version` changes with the set of enabled breakpoints, so that whoever prepares for them can see
    at the price of one comparison that nothing has changed; it is 0 while none was ever set.
    `finding_ids` gives the ids that a `finding` is checked against; without any, none is refused.
    `changed` is called after each change of that set, in the thread that made it.
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
        """Set a breakpoint. `text` may end with options in brackets, which the others add to.

        Raises `ExpressionError`, which points at what cannot be read.
        """
        condition, said = split_options(text)
        expression = parse(condition)
        if self._finding_ids is not None and has_finding(expression):
            parse(condition, finding_ids=self._finding_ids() or None)
        options = BreakpointOptions(
            max(said.hits, hits), said.once or once, said.log or log_only, said.off
        )
        with self._lock:
            number = next(self._numbers)
            about = (number, expression, options, not options.off)
            made = Breakpoint(*about, source=source, enabled_at=time.time())
            self._store(made)
        self.on_change()
        return made.info()

    def list(self) -> tuple[BreakpointInfo, ...]:
        """Return all of them, in the order in which they were set."""
        with self._lock:
            return tuple(each.info() for each in self._breakpoints.values())

    def remove(self, number: int) -> None:
        """Take one out. Raises `KeyError` for a number that none has."""
        with self._lock:
            del self._breakpoints[number]
            self.version += 1
        self.on_change()

    def enable(self, number: int, on: bool) -> BreakpointInfo:
        """Switch one on or off. Raises `KeyError` for a number that none has."""
        with self._lock:
            made = replace(self._breakpoints[number], is_enabled=on, enabled_at=time.time())
            self._store(made)
        self.on_change()
        return made.info()

    def set_note(self, number: int, note: str) -> None:
        """Say something of a breakpoint to whoever lists it."""
        with self._lock:
            if number in self._breakpoints:
                self._breakpoints[number] = replace(self._breakpoints[number], note=note)

    def enabled(self) -> tuple[Breakpoint, ...]:
        """Return those that are switched on."""
        with self._lock:
            return tuple(each for each in self._breakpoints.values() if each.is_enabled)

    def record_hit(self, number: int) -> HitAction:
        """Count a hit; returns what it means.

        One that stops once is switched off by it. `changed` is not called for that, as whoever
        stops has to do so before he gives up waiting for hits.
        """
        with self._lock:
            met = self._breakpoints.get(number)
            if met is None or not met.is_enabled:
                return HitAction.PASS
            met = self._breakpoints[number] = replace(met, n_hits=met.n_hits + 1)
            if met.n_hits < met.options.hits:
                return HitAction.PASS
            if met.options.once:
                self._store(replace(met, is_enabled=False))
        return HitAction.LOG if met.options.log else HitAction.STOP

    def _store(self, made: Breakpoint) -> None:
        self._breakpoints[made.id] = made
        self.version += 1


def _evaluation_note(expression: Expression) -> str:
    """Say where an expression is judged."""
    if any(
        seen.module_pattern is not None and seen.kind in (NAN, INF)
        for seen in observations_in(expression)
    ):
        return "judged at each of these modules, and after each step"
    if needs_calls(expression):
        return "judged at each attention call, and after each step"
    return "judged after each step"
