"""The routes of the control server: their handlers, and the table that OpenAPI is made from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_type_hints

from msgspec import Struct, structs

from flexinspect.control import messages
from flexinspect.core.errors import ControlError
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import ControlTargets

if TYPE_CHECKING:
    from flexinspect.breakpoints.store import BreakpointStore

Handler = TypeVar("Handler", bound=Callable[..., Any])
Method = Literal["GET", "POST", "DELETE"]


class HttpError(ControlError):
    """A request that is refused with the HTTP status `status` instead of 409."""

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Route(Struct, frozen=True):
    """One route; `handler` is the name of its method, `parameter` that of its path parameter."""

    method: Method
    path: str
    handler: str
    summary: str
    response: type[Any]
    body: type[Any] | None = None
    parameter: str | None = None


ROUTES: list[Route] = []
"""All routes, in the order of their handlers."""

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "number": {"type": "integer", "minimum": 0, "maximum": messages.MAX_NUMBER},
    "level": {"type": "string", "enum": list(get_args(messages.Level))},
}
"""The JSON schemas of the path parameters."""

_DEBUG = "/training-logs/debug"
_TRAINING_SUMMARY = "Anomalies of training; all 0 until training is monitored."


def _route(method: Method, path: str, summary: str) -> Callable[[Handler], Handler]:
    """Serve a method at a path; its annotations are the body or path parameter and the response."""

    def register(handler: Handler) -> Handler:
        kinds = get_type_hints(handler)
        parameter = next((name for name in kinds if name in PARAMETERS), None)
        name, response, body = handler.__name__, kinds["return"], kinds.get("body")
        ROUTES.append(Route(method, path, name, summary, response, body, parameter))
        return handler

    return register


class RouteHandlers:
    """One method per route. None of them waits for the model."""

    def __init__(self, targets: ControlTargets) -> None:
        self._targets = targets

    @_route("GET", "/status", "Status of the capture.")
    def status(self) -> messages.StatusResponse:
        targets = self._targets
        return structs.replace(
            targets.barrier.view(),
            level=targets.levels.level,
            layers=targets.levels.layers,
            kind=targets.kind,
            title=targets.title,
            pid=os.getpid(),
            trace=targets.trace,
            can_rewind=targets.estimate_cost is not None,
            n_breakpoints=len(self.breakpoints().breakpoints),
        )

    def _respond(self, message: str) -> messages.CommandResponse:
        self._targets.barrier.has_received_command = True
        return messages.CommandResponse(message, self.status())

    @_route("POST", "/pause", "Pause after the current step.")
    def pause(self) -> messages.CommandResponse:
        return self._respond(self._targets.barrier.pause())

    @_route("POST", "/continue", "Continue; a held run ends.")
    def continue_(self) -> messages.CommandResponse:
        return self._respond(self._targets.barrier.continue_())

    @_route("POST", "/step", "Run some steps, then pause.")
    def step(self, body: messages.StepBody) -> messages.CommandResponse:
        return self._respond(self._targets.barrier.step(body.n))

    @_route("POST", "/run-to", "Run to a step, then pause.")
    def run_to(self, body: messages.RunToBody) -> messages.CommandResponse:
        return self._respond(self._targets.barrier.run_to(body.step, body.generation))

    @_route("POST", "/stop", "End the run after the current step.")
    def stop(self) -> messages.CommandResponse:
        is_loading = self._targets.barrier.view().state == "loading"
        response = self._respond(self._targets.barrier.stop())
        if is_loading and self._targets.kind == "generation":
            # The barrier is not reached until the weights are loaded; SIGINT ends the load now.
            os.kill(os.getpid(), signal.SIGINT)
        return response

    @_route("POST", "/level", "Record at another level.")
    def level(self, body: messages.LevelBody) -> messages.CommandResponse:
        self._targets.levels.set_level(body.level)
        return self._respond(f"level {body.level} from the next step on")

    @_route("POST", "/layers", "Choose the layers whose activations level extreme stores.")
    def layers(self, body: messages.LayersBody) -> messages.CommandResponse:
        self._targets.levels.set_layers(body.layers)
        is_stored = self._targets.levels.level == "extreme"
        note = "" if is_stored else "; only level extreme stores activations"
        return self._respond(f"layers {body.layers} from the next step on{note}")

    @_route("GET", "/breakpoints", "List all breakpoints.")
    def breakpoints(self) -> messages.Breakpoints:
        store = self._targets.breakpoints
        return messages.Breakpoints(store.list() if store is not None else ())

    @_route("POST", "/breakpoints", "Add a breakpoint.")
    def add_breakpoint(self, body: messages.BreakpointBody) -> messages.BreakpointInfo:
        with self._breakpoint_store() as store:
            return store.add(body.text, hits=body.hits, once=body.once, log_only=body.log_only)

    @_route("DELETE", "/breakpoints/{number}", "Remove a breakpoint.")
    def remove_breakpoint(self, number: int) -> messages.Breakpoints:
        with self._breakpoint_store(number) as store:
            store.remove(number)
        return self.breakpoints()

    @_route("POST", "/breakpoints/{number}/enable", "Enable a breakpoint.")
    def enable_breakpoint(self, number: int) -> messages.BreakpointInfo:
        with self._breakpoint_store(number) as store:
            return store.enable(number, True)

    @_route("POST", "/breakpoints/{number}/disable", "Disable a breakpoint.")
    def disable_breakpoint(self, number: int) -> messages.BreakpointInfo:
        with self._breakpoint_store(number) as store:
            return store.enable(number, False)

    @contextmanager
    def _breakpoint_store(self, number: int | None = None) -> Iterator[BreakpointStore]:
        """Give the breakpoints; a client that changes them can also continue a paused model."""
        self._targets.barrier.has_received_command = True
        if self._targets.breakpoints is None:
            raise ControlError("This capture does not support breakpoints.")
        try:
            yield self._targets.breakpoints
        except KeyError:
            if number is None:
                raise
            raise HttpError(404, f"There is no breakpoint {number}.") from None

    @_route("POST", "/restore", "Rebuild the live state after a step, and pause there.")
    def restore(self, body: messages.Restore) -> messages.CommandResponse:
        return self._queue_rewind(body)

    @_route("POST", "/fork", "Continue from a step with another token, as a new branch.")
    def fork(self, body: messages.Fork) -> messages.CommandResponse:
        if (body.token_id is None) == (body.text is None):
            raise ControlError("A fork needs either a token_id or a text, not both.")
        if body.text == "":
            raise ControlError("The text of a fork is empty.")
        return self._queue_rewind(body)

    @_route("POST", "/edit", "Continue from a step with another mask, as a new branch.")
    def edit(self, body: messages.EditMask) -> messages.CommandResponse:
        if not body.edits:
            raise ControlError("An edit of the mask needs at least one change.")
        return self._queue_rewind(body)

    def _queue_rewind(self, command: messages.RewindCommand) -> messages.CommandResponse:
        cost = self._estimate_cost(command)
        if command.dry_run:
            return messages.CommandResponse(cost.sentence, self.status(), cost=cost)
        queued = self._targets.barrier.queue_rewind(command)
        response = self._respond(f"the {queued.command.kind} runs next")
        return messages.CommandResponse(response.message, response.status, queued.number, cost)

    def _estimate_cost(self, command: messages.RewindCommand) -> messages.Cost:
        if self._targets.estimate_cost is not None:
            return self._targets.estimate_cost(command)
        refusal = "This capture cannot restore, fork or edit:"
        if self._targets.kind == "generation":
            raise ControlError(
                f"{refusal} the model is still loading.",
                hint="flexinspect ctl --wait pause returns once it has paused; then repeat this.",
            )
        raise ControlError(
            f"{refusal} flexinspect cannot rewind the program's own loop.",
            hint="flexinspect run --model … runs a generation that supports it.",
        )

    @_route("GET", f"{_DEBUG}/summary", "Anomalies that the debuggers found so far.")
    def debug_summary(self) -> messages.DebugSummaryResponse:
        return control_protocols.debug_summary()

    @_route("GET", f"{_DEBUG}/training/summary", _TRAINING_SUMMARY)
    def training_summary(self) -> messages.TrainingSummaryResponse:
        return control_protocols.training_summary()

    @_route("POST", f"{_DEBUG}/level/{{level}}", "Record at another level.")
    def debug_level(self, level: str) -> messages.CommandResponse:
        if level not in get_args(messages.Level):
            known = ", ".join(get_args(messages.Level))
            raise HttpError(404, f"There is no level {level}.", hint=f"The levels are {known}.")
        control_protocols.set_level(level)
        return self.level(messages.LevelBody(cast(messages.Level, level)))

    @_route("POST", f"{_DEBUG}/clear", "Clear the history of anomalies.")
    def debug_clear(self) -> messages.DebugSummaryResponse:
        control_protocols.clear()
        return control_protocols.debug_summary()
