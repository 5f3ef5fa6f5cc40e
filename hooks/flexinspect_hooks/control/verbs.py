"""The verbs of the control server, and the table of its routes that the OpenAPI document shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from flexinspect.control.messages import (
    Answer,
    BreakpointBody,
    BreakpointInfo,
    Breakpoints,
    DebugSummary,
    EditBody,
    EditMask,
    Fork,
    ForkBody,
    LayersBody,
    Level,
    LevelBody,
    Order,
    Restore,
    RestoreBody,
    RunToBody,
    Status,
    StepBody,
    TrainingSummary,
    Wish,
)
from flexinspect.errors import ControlError
from flexinspect_hooks.control import summaries
from flexinspect_hooks.control.parts import BreakpointBook, Parts, Traveller


class AbsentError(ControlError):
    """What a path names is not there."""


@dataclass(frozen=True, slots=True)
class About:
    """What a capture says of itself: see `Status`."""

    kind: Literal["generation", "program", "watch"]
    title: str
    trace: str


class Verbs:
    """What each route does. Nothing here waits for the model."""

    def __init__(self, parts: Parts, about: About) -> None:
        self._parts, self._about = parts, about

    # -- looking ---------------------------------------------------------------------------------

    def status(self) -> Status:
        parts, about = self._parts, self._about
        view = parts.gate.view()
        return Status(
            state=view.state,
            place=view.place,
            says=view.says,
            reason=view.reason,
            until=view.until,
            level=cast(Level, parts.levels.level),
            layers=parts.levels.layers,
            kind=about.kind,
            title=about.title,
            pid=os.getpid(),
            trace=about.trace,
            travels=parts.traveller is not None,
            n_breakpoints=len(parts.breakpoints.list()) if parts.breakpoints is not None else 0,
            order=view.order,
        )

    def _answer(self, said: str) -> Answer:
        self._parts.gate.is_commanded = True
        return Answer(said, self.status())

    # -- going and stopping ----------------------------------------------------------------------

    def pause(self) -> Answer:
        return self._answer(self._parts.gate.pause())

    def continue_(self) -> Answer:
        return self._answer(self._parts.gate.continue_())

    def step(self, body: StepBody) -> Answer:
        return self._answer(self._parts.gate.step(body.n))

    def run_to(self, body: RunToBody) -> Answer:
        return self._answer(self._parts.gate.run_to(body.step, body.generation))

    def stop(self) -> Answer:
        is_loading = self._parts.gate.view().state == "loading"
        answer = self._answer(self._parts.gate.stop())
        if is_loading and self._about.kind == "generation":
            # No boundary comes until the weights are there; Ctrl-C would end it now.
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    # -- how much is recorded --------------------------------------------------------------------

    def level(self, body: LevelBody) -> Answer:
        self._parts.levels.set_level(body.level)
        return self._answer(f"level {body.level} from the next step on")

    def layers(self, body: LayersBody) -> Answer:
        levels = self._parts.levels
        levels.set_layers(body.layers)
        only = "" if levels.level == "extreme" else "; only level extreme stores activations"
        return self._answer(f"layers {body.layers} from the next step on{only}")

    # -- breakpoints -----------------------------------------------------------------------------

    def breakpoints(self) -> Breakpoints:
        book = self._parts.breakpoints
        return Breakpoints(tuple(book.list()) if book is not None else ())

    def add_breakpoint(self, body: BreakpointBody) -> BreakpointInfo:
        return self._book().add(body.text, hits=body.hits, once=body.once, log_only=body.log_only)

    def remove_breakpoint(self, number: int) -> Breakpoints:
        try:
            self._book().remove(number)
        except KeyError:
            raise _no_breakpoint(number) from None
        return self.breakpoints()

    def enable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, True)

    def disable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, False)

    def _enable(self, number: int, on: bool) -> BreakpointInfo:
        try:
            return self._book().enable(number, on)
        except KeyError:
            raise _no_breakpoint(number) from None

    def _book(self) -> BreakpointBook:
        """Return what takes breakpoints; whoever changes one could continue the model as well."""
        self._parts.gate.is_commanded = True
        if self._parts.breakpoints is None:
            raise ControlError("This capture takes no breakpoints.")
        return self._parts.breakpoints

    # -- going elsewhere -------------------------------------------------------------------------

    def restore(self, body: RestoreBody) -> Answer:
        return self._order(Restore(body.place), dry=body.dry_run)

    def fork(self, body: ForkBody) -> Answer:
        if (body.token_id is None) == (body.text is None):
            raise ControlError("A fork needs either a token_id or a text.")
        if body.text == "":
            raise ControlError("The text of a fork is empty.")
        wish = Fork(body.place, body.token_id, body.text, body.stays)
        return self._order(wish, dry=body.dry_run)

    def edit(self, body: EditBody) -> Answer:
        if not body.edits:
            raise ControlError("An edit of the mask needs at least one change.")
        return self._order(EditMask(body.place, body.edits, body.stays), dry=body.dry_run)

    def _order(self, wish: Wish, *, dry: bool) -> Answer:
        cost = self._traveller().check(Order(0, wish))
        if dry:
            return Answer(cost.sentence, self.status(), None, cost)
        order = self._parts.gate.order(wish)
        return replace(self._answer(f"the {order.kind} is next"), order=order.number, cost=cost)

    def _traveller(self) -> Traveller:
        traveller = self._parts.traveller
        if traveller is None:
            own = self._about.kind != "generation"
            why = "its loop is the program's own, which cannot be put back" if own else "it is off"
            raise ControlError(
                f"This capture cannot restore, fork or edit: {why}.",
                hint="flexinspect run --model … runs a generation that can." if own else None,
            )
        return traveller

    # -- summaries -------------------------------------------------------------------------------

    def debug_summary(self) -> DebugSummary:
        return summaries.debug_summary()

    def training_summary(self) -> TrainingSummary:
        return summaries.training_summary()

    def debug_level(self, level: str) -> Answer:
        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise AbsentError(f"There is no level {level}.", hint=f"The levels are {known}.")
        summaries.set_level(level)
        return self.level(LevelBody(cast(Level, level)))

    def debug_clear(self) -> DebugSummary:
        summaries.clear()
        return summaries.debug_summary()


def _no_breakpoint(number: int) -> AbsentError:
    return AbsentError(f"There is no breakpoint {number}.")


@dataclass(frozen=True, slots=True)
class Route:
    """One route: how it is asked, what it takes, and what it answers.

    `parameter` is the name and schema of the part of the path in braces.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    verb: str
    summary: str
    answer: type[Any]
    body: type[Any] | None = None
    parameter: tuple[str, Mapping[str, Any]] | None = None

    def call(self, verbs: Verbs) -> Callable[..., Any]:
        """Return the verb to be called with its parameter or body."""
        return cast(Callable[..., Any], getattr(verbs, self.verb))


_NUMBER = ("number", {"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
_LEVEL = ("level", {"type": "string", "enum": list(get_args(Level))})
_DEBUG = "/training-logs/debug"

ROUTES: tuple[Route, ...] = (
    Route("GET", "/status", "status", "How the capture stands.", Status),
    Route("POST", "/pause", "pause", "Pause after this step.", Answer),
    Route("POST", "/continue", "continue_", "Go on; a run that is held ends.", Answer),
    Route("POST", "/step", "step", "Go on for some steps, then pause.", Answer, StepBody),
    Route("POST", "/run-to", "run_to", "Go on until a step has finished.", Answer, RunToBody),
    Route("POST", "/stop", "stop", "End the run after this step, as Ctrl-C does.", Answer),
    Route("POST", "/level", "level", "Record at another level.", Answer, LevelBody),
    Route(
        "POST", "/layers", "layers", "Store other layers' activations at level extreme.",
        Answer, LayersBody,
    ),
    Route(
        "POST", "/restore", "restore", "Rebuild the live state after a step, and pause there.",
        Answer, RestoreBody,
    ),
    Route(
        "POST", "/fork", "fork", "Go on from a step with another token, as a new branch.",
        Answer, ForkBody,
    ),
    Route(
        "POST", "/edit", "edit", "Go on from a step with another mask, as a new branch.",
        Answer, EditBody,
    ),
    Route("GET", "/breakpoints", "breakpoints", "All breakpoints.", Breakpoints),
    Route(
        "POST", "/breakpoints", "add_breakpoint", "Set a breakpoint.",
        BreakpointInfo, BreakpointBody,
    ),
    Route(
        "DELETE", "/breakpoints/{number}", "remove_breakpoint", "Remove a breakpoint.",
        Breakpoints, None, _NUMBER,
    ),
    Route(
        "POST", "/breakpoints/{number}/enable", "enable_breakpoint", "Switch a breakpoint on.",
        BreakpointInfo, None, _NUMBER,
    ),
    Route(
        "POST", "/breakpoints/{number}/disable", "disable_breakpoint", "Switch a breakpoint off.",
        BreakpointInfo, None, _NUMBER,
    ),
    Route(
        "GET", f"{_DEBUG}/summary", "debug_summary", "Anomalies that were met so far.",
        DebugSummary,
    ),
    Route(
        "GET", f"{_DEBUG}/training/summary", "training_summary",
        "Anomalies of training; all 0 until training is monitored.", TrainingSummary,
    ),
    Route(
        "POST", f"{_DEBUG}/level/{{level}}", "debug_level", "Record at another level.",
        Answer, None, _LEVEL,
    ),
    Route(
        "POST", f"{_DEBUG}/clear", "debug_clear", "Forget the history of anomalies.", DebugSummary
    ),
)  # fmt: skip
