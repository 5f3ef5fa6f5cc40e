"""The verbs of the control server, and the table of its routes that the OpenAPI document shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from flexinspect.control.messages import (
    BreakpointBody,
    BreakpointInfo,
    Breakpoints,
    CommandResponse,
    DebugSummaryResponse,
    EditBody,
    EditMask,
    Fork,
    ForkBody,
    LayersBody,
    Level,
    LevelBody,
    QueuedRewind,
    Restore,
    RestoreBody,
    RewindCommand,
    RunToBody,
    StatusResponse,
    StepBody,
    TrainingSummaryResponse,
)
from flexinspect.core.errors import ControlError
from flexinspect_hooks.control import targets
from flexinspect_hooks.control.targets import BreakpointControl, ControlTargets, RewindTarget


class NotFoundError(ControlError):
    """What a path names is not there."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """What a capture says of itself: see `Status`."""

    kind: Literal["generation", "program", "watch"]
    title: str
    trace: str


class RouteHandlers:
    """What each route does. Nothing here waits for the model."""

    def __init__(self, targets: ControlTargets, info: CaptureInfo) -> None:
        self._targets, self._info = targets, info

    # -- looking ---------------------------------------------------------------------------------

    def status(self) -> StatusResponse:
        parts, about = self._targets, self._info
        view = parts.barrier.view()
        return StatusResponse(
            state=view.state,
            place=view.place,
            description=view.description,
            reason=view.reason,
            until=view.until,
            level=cast(Level, parts.levels.level),
            layers=parts.levels.layers,
            kind=about.kind,
            title=about.title,
            pid=os.getpid(),
            trace=about.trace,
            can_rewind=parts.rewind_target is not None,
            n_breakpoints=len(parts.breakpoints.list()) if parts.breakpoints is not None else 0,
            last_rewind=view.last_rewind,
        )

    def _respond(self, said: str) -> CommandResponse:
        self._targets.barrier.has_received_command = True
        return CommandResponse(said, self.status())

    # -- going and stopping ----------------------------------------------------------------------

    def pause(self) -> CommandResponse:
        return self._respond(self._targets.barrier.pause())

    def continue_(self) -> CommandResponse:
        return self._respond(self._targets.barrier.continue_())

    def step(self, body: StepBody) -> CommandResponse:
        return self._respond(self._targets.barrier.step(body.n))

    def run_to(self, body: RunToBody) -> CommandResponse:
        return self._respond(self._targets.barrier.run_to(body.step, body.generation))

    def stop(self) -> CommandResponse:
        is_loading = self._targets.barrier.view().state == "loading"
        answer = self._respond(self._targets.barrier.stop())
        if is_loading and self._info.kind == "generation":
            # No boundary comes until the weights are there; Ctrl-C would end it now.
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    # -- how much is recorded --------------------------------------------------------------------

    def level(self, body: LevelBody) -> CommandResponse:
        self._targets.levels.set_level(body.level)
        return self._respond(f"level {body.level} from the next step on")

    def layers(self, body: LayersBody) -> CommandResponse:
        levels = self._targets.levels
        levels.set_layers(body.layers)
        only = "" if levels.level == "extreme" else "; only level extreme stores activations"
        return self._respond(f"layers {body.layers} from the next step on{only}")

    # -- breakpoints -----------------------------------------------------------------------------

    def breakpoints(self) -> Breakpoints:
        book = self._targets.breakpoints
        return Breakpoints(tuple(book.list()) if book is not None else ())

    def add_breakpoint(self, body: BreakpointBody) -> BreakpointInfo:
        return self._breakpoint_control().add(
            body.text, hits=body.hits, once=body.once, log_only=body.log_only
        )

    def remove_breakpoint(self, number: int) -> Breakpoints:
        try:
            self._breakpoint_control().remove(number)
        except KeyError:
            raise _no_breakpoint(number) from None
        return self.breakpoints()

    def enable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, True)

    def disable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, False)

    def _enable(self, number: int, on: bool) -> BreakpointInfo:
        try:
            return self._breakpoint_control().enable(number, on)
        except KeyError:
            raise _no_breakpoint(number) from None

    def _breakpoint_control(self) -> BreakpointControl:
        """Return what takes breakpoints; whoever changes one could continue the model as well."""
        self._targets.barrier.has_received_command = True
        if self._targets.breakpoints is None:
            raise ControlError("This capture takes no breakpoints.")
        return self._targets.breakpoints

    # -- going elsewhere -------------------------------------------------------------------------

    def restore(self, body: RestoreBody) -> CommandResponse:
        return self._queue_rewind(Restore(body.place), dry=body.dry_run)

    def fork(self, body: ForkBody) -> CommandResponse:
        if (body.token_id is None) == (body.text is None):
            raise ControlError("A fork needs either a token_id or a text.")
        if body.text == "":
            raise ControlError("The text of a fork is empty.")
        wish = Fork(body.place, body.token_id, body.text, body.stay_paused)
        return self._queue_rewind(wish, dry=body.dry_run)

    def edit(self, body: EditBody) -> CommandResponse:
        if not body.edits:
            raise ControlError("An edit of the mask needs at least one change.")
        return self._queue_rewind(
            EditMask(body.place, body.edits, body.stay_paused), dry=body.dry_run
        )

    def _queue_rewind(self, wish: RewindCommand, *, dry: bool) -> CommandResponse:
        cost = self._rewind_target().estimate_cost(QueuedRewind(0, wish))
        if dry:
            return CommandResponse(cost.sentence, self.status(), None, cost)
        order = self._targets.barrier.queue_rewind(wish)
        return replace(
            self._respond(f"the {order.kind} is next"), rewind_number=order.number, cost=cost
        )

    def _rewind_target(self) -> RewindTarget:
        traveller = self._targets.rewind_target
        if traveller is None:
            own = self._info.kind != "generation"
            why = "its loop is the program's own, which cannot be put back" if own else "it is off"
            raise ControlError(
                f"This capture cannot restore, fork or edit: {why}.",
                hint="flexinspect run --model … runs a generation that can." if own else None,
            )
        return traveller

    # -- summaries -------------------------------------------------------------------------------

    def debug_summary(self) -> DebugSummaryResponse:
        return targets.debug_summary()

    def training_summary(self) -> TrainingSummaryResponse:
        return targets.training_summary()

    def debug_level(self, level: str) -> CommandResponse:
        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise NotFoundError(f"There is no level {level}.", hint=f"The levels are {known}.")
        targets.set_level(level)
        return self.level(LevelBody(cast(Level, level)))

    def debug_clear(self) -> DebugSummaryResponse:
        targets.clear()
        return targets.debug_summary()


def _no_breakpoint(number: int) -> NotFoundError:
    return NotFoundError(f"There is no breakpoint {number}.")


@dataclass(frozen=True, slots=True)
class Route:
    """One route: how it is asked, what it takes, and what it answers.

    `parameter` is the name and schema of the part of the path in braces.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: str
    summary: str
    response: type[Any]
    body: type[Any] | None = None
    parameter: tuple[str, Mapping[str, Any]] | None = None

    def bind(self, handlers: RouteHandlers) -> Callable[..., Any]:
        """Return the verb to be called with its parameter or body."""
        return cast(Callable[..., Any], getattr(handlers, self.handler))


_NUMBER = ("number", {"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
_LEVEL = ("level", {"type": "string", "enum": list(get_args(Level))})
_DEBUG = "/training-logs/debug"

ROUTES: tuple[Route, ...] = (
    Route("GET", "/status", "status", "How the capture stands.", StatusResponse),
    Route("POST", "/pause", "pause", "Pause after this step.", CommandResponse),
    Route("POST", "/continue", "continue_", "Go on; a run that is held ends.", CommandResponse),
    Route("POST", "/step", "step", "Go on for some steps, then pause.", CommandResponse, StepBody),
    Route("POST", "/run-to", "run_to", "Go on until a step has finished.", CommandResponse, RunToBody),
    Route("POST", "/stop", "stop", "End the run after this step, as Ctrl-C does.", CommandResponse),
    Route("POST", "/level", "level", "Record at another level.", CommandResponse, LevelBody),
    Route(
        "POST", "/layers", "layers", "Store other layers' activations at level extreme.",
        CommandResponse, LayersBody,
    ),
    Route(
        "POST", "/restore", "restore", "Rebuild the live state after a step, and pause there.",
        CommandResponse, RestoreBody,
    ),
    Route(
        "POST", "/fork", "fork", "Go on from a step with another token, as a new branch.",
        CommandResponse, ForkBody,
    ),
    Route(
        "POST", "/edit", "edit", "Go on from a step with another mask, as a new branch.",
        CommandResponse, EditBody,
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
        DebugSummaryResponse,
    ),
    Route(
        "GET", f"{_DEBUG}/training/summary", "training_summary",
        "Anomalies of training; all 0 until training is monitored.", TrainingSummaryResponse,
    ),
    Route(
        "POST", f"{_DEBUG}/level/{{level}}", "debug_level", "Record at another level.",
        CommandResponse, None, _LEVEL,
    ),
    Route(
        "POST", f"{_DEBUG}/clear", "debug_clear", "Forget the history of anomalies.", DebugSummaryResponse
    ),
)  # fmt: skip
