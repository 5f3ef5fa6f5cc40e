"""The routes of the control server: their handlers, and the table that OpenAPI is made from."""

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
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import (
    BreakpointControl,
    ControlTargets,
    RewindTarget,
)


class NotFoundError(ControlError):
    """The breakpoint or level that a path names does not exist."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """The fields of `StatusResponse` that stay the same for the whole run."""

    kind: Literal["generation", "program", "watch"]
    title: str
    trace: str


class RouteHandlers:
    """One method per route. None of them waits for the model."""

    def __init__(self, targets: ControlTargets, info: CaptureInfo) -> None:
        self._targets, self._info = targets, info

    # -- queries ---------------------------------------------------------------------------------

    def status(self) -> StatusResponse:
        targets, info = self._targets, self._info
        view = targets.barrier.view()
        return StatusResponse(
            state=view.state,
            place=view.place,
            description=view.description,
            reason=view.reason,
            until=view.until,
            level=cast(Level, targets.levels.level),
            layers=targets.levels.layers,
            kind=info.kind,
            title=info.title,
            pid=os.getpid(),
            trace=info.trace,
            can_rewind=targets.rewind_target is not None,
            n_breakpoints=len(self.breakpoints().breakpoints),
            last_rewind=view.last_rewind,
        )

    def _respond(self, message: str) -> CommandResponse:
        self._targets.barrier.has_received_command = True
        return CommandResponse(message, self.status())

    # -- running and stopping --------------------------------------------------------------------

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
        response = self._respond(self._targets.barrier.stop())
        if is_loading and self._info.kind == "generation":
            # The barrier is not reached until the weights are loaded; SIGINT ends the load now.
            os.kill(os.getpid(), signal.SIGINT)
        return response

    # -- level and layers ------------------------------------------------------------------------

    def level(self, body: LevelBody) -> CommandResponse:
        self._targets.levels.set_level(body.level)
        return self._respond(f"level {body.level} from the next step on")

    def layers(self, body: LayersBody) -> CommandResponse:
        levels = self._targets.levels
        levels.set_layers(body.layers)
        note = "" if levels.level == "extreme" else "; only level extreme stores activations"
        return self._respond(f"layers {body.layers} from the next step on{note}")

    # -- breakpoints -----------------------------------------------------------------------------

    def breakpoints(self) -> Breakpoints:
        control = self._targets.breakpoints
        return Breakpoints(tuple(control.list()) if control is not None else ())

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
        """Return the breakpoints of the run, to change them.

        That counts as a received command: a client that changes breakpoints can also continue a
        paused model.
        """
        self._targets.barrier.has_received_command = True
        if self._targets.breakpoints is None:
            raise ControlError("This capture does not support breakpoints.")
        return self._targets.breakpoints

    # -- rewinding -------------------------------------------------------------------------------

    def restore(self, body: RestoreBody) -> CommandResponse:
        return self._queue_rewind(Restore(body.place), dry_run=body.dry_run)

    def fork(self, body: ForkBody) -> CommandResponse:
        if (body.token_id is None) == (body.text is None):
            raise ControlError("A fork needs either a token_id or a text, not both.")
        if body.text == "":
            raise ControlError("The text of a fork is empty.")
        command = Fork(body.place, body.token_id, body.text, body.stay_paused)
        return self._queue_rewind(command, dry_run=body.dry_run)

    def edit(self, body: EditBody) -> CommandResponse:
        if not body.edits:
            raise ControlError("An edit of the mask needs at least one change.")
        command = EditMask(body.place, body.edits, body.stay_paused)
        return self._queue_rewind(command, dry_run=body.dry_run)

    def _queue_rewind(self, command: RewindCommand, *, dry_run: bool) -> CommandResponse:
        cost = self._rewind_target().estimate_cost(QueuedRewind(0, command))
        if dry_run:
            return CommandResponse(cost.sentence, self.status(), cost=cost)
        queued = self._targets.barrier.queue_rewind(command)
        response = self._respond(f"the {queued.kind} runs next")
        return replace(response, rewind_number=queued.number, cost=cost)

    def _rewind_target(self) -> RewindTarget:
        target = self._targets.rewind_target
        if target is not None:
            return target
        if self._info.kind == "generation":
            raise ControlError("This capture cannot restore, fork or edit: rewinding is disabled.")
        raise ControlError(
            "This capture cannot restore, fork or edit: flexinspect cannot rewind the program's "
            "own loop.",
            hint="flexinspect run --model … runs a generation that supports it.",
        )

    # -- summaries -------------------------------------------------------------------------------

    def debug_summary(self) -> DebugSummaryResponse:
        return control_protocols.debug_summary()

    def training_summary(self) -> TrainingSummaryResponse:
        return control_protocols.training_summary()

    def debug_level(self, level: str) -> CommandResponse:
        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise NotFoundError(f"There is no level {level}.", hint=f"The levels are {known}.")
        control_protocols.set_level(level)
        return self.level(LevelBody(cast(Level, level)))

    def debug_clear(self) -> DebugSummaryResponse:
        control_protocols.clear()
        return control_protocols.debug_summary()


def _no_breakpoint(number: int) -> NotFoundError:
    return NotFoundError(f"There is no breakpoint {number}.")


@dataclass(frozen=True, slots=True)
class Route:
    """One route: its method and path, the name of its handler, its body and its response.

    `parameter` is the name and the JSON schema of the path parameter in braces.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: str
    summary: str
    response: type[Any]
    body: type[Any] | None = None
    parameter: tuple[str, Mapping[str, Any]] | None = None

    def bind(self, handlers: RouteHandlers) -> Callable[..., Any]:
        """Return the handler, to be called with the path parameter or the body."""
        return cast(Callable[..., Any], getattr(handlers, self.handler))


_NUMBER = ("number", {"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
_LEVEL = ("level", {"type": "string", "enum": list(get_args(Level))})
_DEBUG = "/training-logs/debug"

ROUTES: tuple[Route, ...] = (
    Route("GET", "/status", "status", "Status of the capture.", StatusResponse),
    Route("POST", "/pause", "pause", "Pause after the current step.", CommandResponse),
    Route("POST", "/continue", "continue_", "Continue; a held run ends.", CommandResponse),
    Route("POST", "/step", "step", "Run some steps, then pause.", CommandResponse, StepBody),
    Route("POST", "/run-to", "run_to", "Run to a step, then pause.", CommandResponse, RunToBody),
    Route("POST", "/stop", "stop", "End the run after the current step.", CommandResponse),
    Route("POST", "/level", "level", "Record at another level.", CommandResponse, LevelBody),
    Route(
        "POST",
        "/layers",
        "layers",
        "Choose the layers whose activations level extreme stores.",
        CommandResponse,
        LayersBody,
    ),
    Route(
        "POST",
        "/restore",
        "restore",
        "Rebuild the live state after a step, and pause there.",
        CommandResponse,
        RestoreBody,
    ),
    Route(
        "POST",
        "/fork",
        "fork",
        "Continue from a step with another token, as a new branch.",
        CommandResponse,
        ForkBody,
    ),
    Route(
        "POST",
        "/edit",
        "edit",
        "Continue from a step with another mask, as a new branch.",
        CommandResponse,
        EditBody,
    ),
    Route("GET", "/breakpoints", "breakpoints", "List all breakpoints.", Breakpoints),
    Route(
        "POST",
        "/breakpoints",
        "add_breakpoint",
        "Add a breakpoint.",
        BreakpointInfo,
        BreakpointBody,
    ),
    Route(
        "DELETE",
        "/breakpoints/{number}",
        "remove_breakpoint",
        "Remove a breakpoint.",
        Breakpoints,
        parameter=_NUMBER,
    ),
    Route(
        "POST",
        "/breakpoints/{number}/enable",
        "enable_breakpoint",
        "Enable a breakpoint.",
        BreakpointInfo,
        parameter=_NUMBER,
    ),
    Route(
        "POST",
        "/breakpoints/{number}/disable",
        "disable_breakpoint",
        "Disable a breakpoint.",
        BreakpointInfo,
        parameter=_NUMBER,
    ),
    Route(
        "GET",
        f"{_DEBUG}/summary",
        "debug_summary",
        "Anomalies that the debuggers found so far.",
        DebugSummaryResponse,
    ),
    Route(
        "GET",
        f"{_DEBUG}/training/summary",
        "training_summary",
        "Anomalies of training; all 0 until training is monitored.",
        TrainingSummaryResponse,
    ),
    Route(
        "POST",
        f"{_DEBUG}/level/{{level}}",
        "debug_level",
        "Record at another level.",
        CommandResponse,
        parameter=_LEVEL,
    ),
    Route(
        "POST",
        f"{_DEBUG}/clear",
        "debug_clear",
        "Clear the history of anomalies.",
        DebugSummaryResponse,
    ),
)
