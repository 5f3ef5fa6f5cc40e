"""The routes of the control server: their handlers, and the table that OpenAPI is made from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_type_hints

from flexinspect.control.messages import (
    MAX_NUMBER,
    BreakpointBody,
    BreakpointInfo,
    Breakpoints,
    CommandResponse,
    DebugSummaryResponse,
    EditMask,
    Fork,
    Kind,
    LayersBody,
    Level,
    LevelBody,
    QueuedRewind,
    Restore,
    RewindCommand,
    RunToBody,
    StatusResponse,
    StepBody,
    TrainingSummaryResponse,
)
from flexinspect.core.errors import ControlError
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import ControlTargets, RewindTarget

if TYPE_CHECKING:
    from flexinspect.breakpoints.store import BreakpointStore

Handler = TypeVar("Handler", bound=Callable[..., Any])


class NotFoundError(ControlError):
    """The breakpoint or level that a path names does not exist."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """The fields of `StatusResponse` that stay the same for the whole run."""

    kind: Kind
    title: str
    trace: str


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


ROUTES: list[Route] = []
"""All routes, in the order of their handlers."""

_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "number": {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER},
    "level": {"type": "string", "enum": list(get_args(Level))},
}
_DEBUG = "/training-logs/debug"


def _route(
    method: Literal["GET", "POST", "DELETE"], path: str, summary: str
) -> Callable[[Handler], Handler]:
    """Serve a method at a path; its annotations are the body or path parameter and the response."""

    def register(handler: Handler) -> Handler:
        kinds = get_type_hints(handler)
        parameter = next(((name, _PARAMETERS[name]) for name in kinds if name in _PARAMETERS), None)
        name, response, body = handler.__name__, kinds["return"], kinds.get("body")
        ROUTES.append(Route(method, path, name, summary, response, body, parameter))
        return handler

    return register


class RouteHandlers:
    """One method per route. None of them waits for the model."""

    def __init__(self, targets: ControlTargets, info: CaptureInfo) -> None:
        self._targets, self._info = targets, info

    # -- queries ---------------------------------------------------------------------------------

    @_route("GET", "/status", "Status of the capture.")
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

    @_route("POST", "/pause", "Pause after the current step.")
    def pause(self) -> CommandResponse:
        return self._respond(self._targets.barrier.pause())

    @_route("POST", "/continue", "Continue; a held run ends.")
    def continue_(self) -> CommandResponse:
        return self._respond(self._targets.barrier.continue_())

    @_route("POST", "/step", "Run some steps, then pause.")
    def step(self, body: StepBody) -> CommandResponse:
        return self._respond(self._targets.barrier.step(body.n))

    @_route("POST", "/run-to", "Run to a step, then pause.")
    def run_to(self, body: RunToBody) -> CommandResponse:
        return self._respond(self._targets.barrier.run_to(body.step, body.generation))

    @_route("POST", "/stop", "End the run after the current step.")
    def stop(self) -> CommandResponse:
        is_loading = self._targets.barrier.view().state == "loading"
        response = self._respond(self._targets.barrier.stop())
        if is_loading and self._info.kind == "generation":
            # The barrier is not reached until the weights are loaded; SIGINT ends the load now.
            os.kill(os.getpid(), signal.SIGINT)
        return response

    # -- level and layers ------------------------------------------------------------------------

    @_route("POST", "/level", "Record at another level.")
    def level(self, body: LevelBody) -> CommandResponse:
        self._targets.levels.set_level(body.level)
        return self._respond(f"level {body.level} from the next step on")

    @_route("POST", "/layers", "Choose the layers whose activations level extreme stores.")
    def layers(self, body: LayersBody) -> CommandResponse:
        levels = self._targets.levels
        levels.set_layers(body.layers)
        note = "" if levels.level == "extreme" else "; only level extreme stores activations"
        return self._respond(f"layers {body.layers} from the next step on{note}")

    # -- breakpoints -----------------------------------------------------------------------------

    @_route("GET", "/breakpoints", "List all breakpoints.")
    def breakpoints(self) -> Breakpoints:
        store = self._targets.breakpoints
        return Breakpoints(store.list() if store is not None else ())

    @_route("POST", "/breakpoints", "Add a breakpoint.")
    def add_breakpoint(self, body: BreakpointBody) -> BreakpointInfo:
        return self._breakpoint_store().add(
            body.text, hits=body.hits, once=body.once, log_only=body.log_only
        )

    @_route("DELETE", "/breakpoints/{number}", "Remove a breakpoint.")
    def remove_breakpoint(self, number: int) -> Breakpoints:
        try:
            self._breakpoint_store().remove(number)
        except KeyError:
            raise _no_breakpoint(number) from None
        return self.breakpoints()

    @_route("POST", "/breakpoints/{number}/enable", "Enable a breakpoint.")
    def enable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, True)

    @_route("POST", "/breakpoints/{number}/disable", "Disable a breakpoint.")
    def disable_breakpoint(self, number: int) -> BreakpointInfo:
        return self._enable(number, False)

    def _enable(self, number: int, on: bool) -> BreakpointInfo:
        try:
            return self._breakpoint_store().enable(number, on)
        except KeyError:
            raise _no_breakpoint(number) from None

    def _breakpoint_store(self) -> BreakpointStore:
        """Return the breakpoints of the run, to change them.

        That counts as a received command: a client that changes breakpoints can also continue a
        paused model.
        """
        self._targets.barrier.has_received_command = True
        if self._targets.breakpoints is None:
            raise ControlError("This capture does not support breakpoints.")
        return self._targets.breakpoints

    # -- rewinding -------------------------------------------------------------------------------

    @_route("POST", "/restore", "Rebuild the live state after a step, and pause there.")
    def restore(self, body: Restore) -> CommandResponse:
        return self._queue_rewind(body)

    @_route("POST", "/fork", "Continue from a step with another token, as a new branch.")
    def fork(self, body: Fork) -> CommandResponse:
        if (body.token_id is None) == (body.text is None):
            raise ControlError("A fork needs either a token_id or a text, not both.")
        if body.text == "":
            raise ControlError("The text of a fork is empty.")
        return self._queue_rewind(body)

    @_route("POST", "/edit", "Continue from a step with another mask, as a new branch.")
    def edit(self, body: EditMask) -> CommandResponse:
        if not body.edits:
            raise ControlError("An edit of the mask needs at least one change.")
        return self._queue_rewind(body)

    def _queue_rewind(self, command: RewindCommand) -> CommandResponse:
        cost = self._rewind_target().estimate_cost(QueuedRewind(0, command))
        if command.dry_run:
            return CommandResponse(cost.sentence, self.status(), cost=cost)
        queued = self._targets.barrier.queue_rewind(command)
        response = self._respond(f"the {queued.kind} runs next")
        return CommandResponse(response.message, response.status, queued.number, cost)

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

    @_route("GET", f"{_DEBUG}/summary", "Anomalies that the debuggers found so far.")
    def debug_summary(self) -> DebugSummaryResponse:
        return control_protocols.debug_summary()

    @_route(
        "GET",
        f"{_DEBUG}/training/summary",
        "Anomalies of training; all 0 until training is monitored.",
    )
    def training_summary(self) -> TrainingSummaryResponse:
        return control_protocols.training_summary()

    @_route("POST", f"{_DEBUG}/level/{{level}}", "Record at another level.")
    def debug_level(self, level: str) -> CommandResponse:
        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise NotFoundError(f"There is no level {level}.", hint=f"The levels are {known}.")
        control_protocols.set_level(level)
        return self.level(LevelBody(cast(Level, level)))

    @_route("POST", f"{_DEBUG}/clear", "Clear the history of anomalies.")
    def debug_clear(self) -> DebugSummaryResponse:
        control_protocols.clear()
        return control_protocols.debug_summary()


def _no_breakpoint(number: int) -> NotFoundError:
    return NotFoundError(f"There is no breakpoint {number}.")
