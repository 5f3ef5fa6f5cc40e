"""The step barrier: it decides whether the next forward may start.

The model's thread passes it between two steps. Without a pending command that costs one read of an
attribute. Commands come from other threads, never wait for the model, and return what will happen;
the state shows when it has happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct, field, structs

from flexinspect.control import messages
from flexinspect.control.messages import QueuedRewind, RewindState, State, StepRef
from flexinspect.core.errors import ControlError, FlexInspectError

STOPPING: Final = "stopping after this step"

_STATE_TEXTS: Mapping[State, str] = {
    "pausing": "pausing after this step",
    "holding": "the generation has ended, and the model is kept alive",
    "finished": "the run is over",
}

_DONE: Mapping[messages.RewindKind, str] = {
    "restore": "restored to",
    "fork": "forked after",
    "edit": "mask edited after",
}


class PauseRequest(Struct, frozen=True):
    """A requested or reached pause and its reason; `on_paused` is called when it is reached."""

    reason: str
    kind: Literal["paused", "breakpoint"] = "paused"
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_paused: Callable[[], None] = lambda: None


class PauseTarget(Struct):
    """Where to pause: after `steps_left` more steps, or after `step` of `generation`.

    With `at_branch_end` it is the end of the branch that runs.
    """

    steps_left: int | None = None
    generation: int = 0
    step: int = 0
    at_branch_end: bool = False

    def describe(self) -> str:
        if self.at_branch_end:
            return "at the end of this branch"
        if self.steps_left is not None:
            n = self.steps_left
            return f"after {n} more steps" if n > 1 else "after the next step"
        qualifier = f" of generation {self.generation}" if self.generation else ""
        return f"after step {self.step}{qualifier}"

    def reason_to_pause(self, place: StepRef, *, ends_branch: bool) -> str | None:
        """Return why to pause after the step `place`, None to continue; counts `steps_left`."""
        if self.at_branch_end:
            return messages.describe_branch_end(place) if ends_branch else None
        if self.steps_left is not None:
            self.steps_left -= place.step >= 0
            return None if self.steps_left else messages.PAUSE_REQUESTED
        if place.generation > self.generation:
            return f"generation {self.generation} ended before step {self.step}"
        is_reached = place.generation == self.generation and place.step >= self.step
        return messages.PAUSE_REQUESTED if is_reached else None


class StepBarrier:
    """Pauses and stops the model between two steps, and passes rewind commands to the engine.

    `record_event` records an event (kind, text, last finished step, facts), `drain` waits until all
    finished steps are in the trace. Both may be set later. One barrier serves all models.
    """

    def __init__(self) -> None:
        self.record_event: Callable[[str, str, StepRef, Mapping[str, Any]], None] = lambda *_: None
        self.drain: Callable[[], None] = lambda: None
        self.stop_debugger: Callable[[str, Mapping[str, Any]], bool] = lambda reason, facts: False
        """Stops in an attached debugger, in this thread; returns False if there is none."""
        self._changed = threading.Condition(threading.RLock())
        self._paused_thread: int | None = None
        """The paused thread: other threads wait for it, and only it takes rewind commands."""
        self._has_work = True
        """Whether the next boundary has work to do; the only attribute that the fast path reads."""
        self._state: State = "loading"
        self._passed_step: StepRef | None = None
        self._pause_request: PauseRequest | None = None
        self._pause_reason: PauseRequest | None = None
        self._target: PauseTarget | None = None
        self._is_stopping = self._waits_for_evaluation = False
        self._pending: QueuedRewind | None = None
        self._rewind_state: RewindState | None = None
        self._last_step = StepRef()
        self._is_start_position = True
        """Whether no step leads to the next place: it is the start, or the target of a rewind."""
        self._rewind_started_at = 0.0
        self.has_received_command = False
        """Whether a client has sent a command; such a client could also continue a paused model."""

    # -- the model's side ------------------------------------------------------------------------

    def between_steps(self, place: StepRef, *, ends_branch: bool = False) -> QueuedRewind | None:
        """Pass the barrier; `place` is the last finished step, `ends_branch` if no other follows.

        Without a pending command this returns at once, otherwise when the model may continue.
        Returns a rewind command to carry out, or None. The same place passes at once the second
        time, so that a loop and the code that it calls may both call this. Raises
        `KeyboardInterrupt` if the run has to stop.
        """
        if not self._has_work:
            self._passed_step = place
            return None
        return self._enter(place, ends_branch=ends_branch)

    def raise_if_stopping(self) -> None:
        """Raise `KeyboardInterrupt` if the run has to stop, without passing the barrier."""
        with self._changed:
            if self._is_stopping:
                self._is_stopping = False
                self._update_has_work()
                raise KeyboardInterrupt

    def hold(self, place: StepRef) -> QueuedRewind | None:
        """Keep the model alive at the end; returns a rewind command, or None to end the run."""
        self.drain()
        with self._changed:
            # Passed: once released, the model does not pause there again.
            self._passed_step = self._last_step = place
            self._pause_request = self._target = self._pause_reason = None
            if self._is_stopping:
                return None
            self._set_state("holding")
            text = f"the model is kept alive {place.describe_after()}"
            self.record_event("model-kept-alive", text, place, {})
            self._wait_while("holding")
            return self._take_rewind()

    def report_result(
        self, queued: QueuedRewind, result: StepRef | FlexInspectError, message: str = ""
    ) -> None:
        """Report the new last step, or the error, of a rewind command.

        After a restore, or a command with `stay_paused`, the model pauses there; after another fork
        or edit a paused model pauses at the end of the branch, and after a failure where it was.
        """
        error = result if isinstance(result, FlexInspectError) else None
        command = queued.command
        with self._changed:
            if isinstance(result, StepRef):
                self._last_step = result
            was_paused, self._pause_reason = self._pause_reason is not None, None
            if error and was_paused:
                self._pause_request = PauseRequest(f"the {command.kind} failed")
            elif not error and (isinstance(command, messages.Restore) or command.stay_paused):
                text = f"{_DONE[command.kind]} token {self._last_step.step + 1}"
                self._pause_request = PauseRequest(text)
            elif was_paused:
                self._target = PauseTarget(at_branch_end=True)
                message += " The model waits at the end of this branch."
            self._rewind_state = RewindState(
                number=queued.number,
                kind=command.kind,
                state="failed" if error else "done",
                message=error.sentence() if error else message,
                place=self._last_step,
                seconds=round(time.monotonic() - self._rewind_started_at, 6),
            )
            self._update_has_work()

    def finish(self) -> None:
        """Mark the run as finished; a waiting rewind command fails."""
        with self._changed:
            self._pending = self._pause_request = self._target = None
            if (active := self._active_rewind()) is not None:
                message = "The run ended first."
                self._rewind_state = structs.replace(active, state="failed", message=message)
            self._set_state("finished")

    def pause_at_breakpoint(
        self,
        reason: str,
        facts: Mapping[str, Any] | None = None,
        kind: Literal["paused", "breakpoint"] = "breakpoint",
        on_paused: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause at the next boundary; may be called from any thread.

        `on_paused` is called in the model's thread when it pauses there, which may never happen.
        """
        with self._changed:
            if self._state not in ("holding", "finished"):
                self._pause_request = PauseRequest(reason, kind, facts or {}, on_paused)
                self._update_has_work()

    def wait_for_evaluation(self, on: bool) -> None:
        """While on, wait at each boundary until all finished steps are written and evaluated."""
        with self._changed:
            self._waits_for_evaluation = on
            self._update_has_work()

    def _enter(self, place: StepRef, *, ends_branch: bool) -> QueuedRewind | None:
        if self._waits_for_evaluation and place != self._passed_step:
            self.drain()
        with self._changed:
            self._wait_for_other_thread()
            is_new = self._update_position(place, ends_branch=ends_branch)
            self.raise_if_stopping()
            if not is_new:
                return None
            if self._pending is not None or self._pause_request is None:
                return self._take_rewind()
        self.drain()  # a client that sees the pause must find every step up to it in the trace
        return None if self._stop_in_debugger(place) else self._pause(place)

    def _stop_in_debugger(self, place: StepRef) -> bool:
        """Stop at a breakpoint in an attached debugger, without the lock: the stop may last."""
        stop = self._pause_request
        if stop is None or stop.kind != "breakpoint":
            return False
        if not self.stop_debugger(stop.reason, {**stop.facts, "step": place.step}):
            return False
        with self._changed:
            if self._pause_request is stop:
                self._pause_request = None
                self._update_has_work()
            text = f"stopped in the debugger {place.describe_after()}: {stop.reason}"
            self.record_event(stop.kind, text, place, stop.facts)
            self.raise_if_stopping()
        return True

    def _update_position(self, place: StepRef, *, ends_branch: bool) -> bool:
        """Note the place that the model reached; False if it has passed it before."""
        is_new, is_start = place != self._passed_step, self._is_start_position
        self._passed_step, self._last_step, self._is_start_position = place, place, False
        if self._state == "loading":
            self._state = "running"
        if is_new and self._target is not None and not is_start:
            reason = self._target.reason_to_pause(place, ends_branch=ends_branch)
            if reason is not None:
                self._pause_request = self._pause_request or PauseRequest(reason)
                self._target = None
        self._update_has_work()
        return is_new

    def _wait_for_other_thread(self) -> None:
        while self._paused_thread not in (None, threading.get_ident()):
            self._changed.wait()

    def _pause(self, place: StepRef) -> QueuedRewind | None:
        with self._changed:
            self._wait_for_other_thread()
            stop = self._pause_request
            if stop is None:
                return None  # withdrawn while this thread waited
            try:
                self._paused_thread = threading.get_ident()
                self._pause_request, self._pause_reason = None, stop
                self._passed_step = self._last_step = place  # another thread may have changed them
                self._set_state("paused")
                text = f"paused {place.describe_after()}: {stop.reason}"
                self.record_event(stop.kind, text, place, stop.facts)
                stop.on_paused()
                self._wait_while("paused")
                if self._pending is not None:
                    return self._take_rewind()
                self.raise_if_stopping()
                self.record_event("resumed", f"continued {place.describe_after()}", place, {})
                return None
            finally:
                self._paused_thread = None
                self._set_state(self._state)

    def _wait_while(self, state: State) -> None:
        try:
            while self._state == state and self._pending is None:
                self._changed.wait()
        finally:
            if self._state == state:  # a rewind command, or Ctrl-C
                self._set_state("running")

    def _take_rewind(self) -> QueuedRewind | None:
        queued, self._pending = self._pending, None
        if queued is not None:
            self._rewind_started_at = time.monotonic()
            self._rewind_state = RewindState(queued.number, queued.command.kind, "working")
            self._passed_step, self._is_start_position = None, True
            self._set_state("running")
        return queued

    # -- the clients' side -----------------------------------------------------------------------

    def view(self) -> messages.StatusResponse:
        """Return the current state; the fields about the run have their defaults."""
        with self._changed:
            # The fast path updates only `_passed_step`.
            passed = self._passed_step if self._passed_step is not None else self._last_step
            state = self._visible_state()
            stop = self._pause_reason if state == "paused" else self._pause_request
            return messages.StatusResponse(
                state=state,
                place=passed,
                description=self._describe(state, passed),
                reason=stop.reason if stop is not None else "",
                until=self._describe_target(),
                last_rewind=self._rewind_state,
            )

    def pause(self, reason: str = messages.PAUSE_REQUESTED) -> str:
        """Pause at the next boundary. Returns what will happen."""
        with self._changed:
            state = self._checked_state()
            if state == "holding":
                return "nothing is running: the generation has ended and the model is kept alive"
            if state != "paused":
                # A breakpoint hit that is about to pause keeps its own reason.
                self._pause_request = self._pause_request or PauseRequest(reason)
                self._update_has_work()
            return self._describe(self._visible_state(), self._last_step)

    def continue_(self) -> str:
        """Continue without a pause; a held run ends."""
        with self._changed:
            state = self._checked_state()
            self._pause_request = self._target = None
            self._resume()
            texts = {"holding": "the run ends", "running": "running, and will not pause"}
            return texts.get(state, "continuing")

    def step(self, n: int = 1) -> str:
        """Run `n` steps, then pause. Raises `ControlError` when there is no next step."""
        if n < 1:
            raise ControlError(f"Cannot run {n} steps.", hint="Give a number of at least 1.")
        return self._run_to_target(PauseTarget(steps_left=n))

    def run_to(self, step: int, generation: int | None = None) -> str:
        """Run until a step has finished, then pause. Raises `ControlError` if it has already."""
        with self._changed:
            place = self.view().place
            target = PauseTarget(None, place.generation if generation is None else generation, step)
            if (place.generation, place.step) >= (target.generation, step):
                raise ControlError(
                    f"Step {step} of generation {target.generation} has already finished: "
                    f"the model is {place.describe_after()}.",
                    hint="Name a later step, or restore that step.",
                )
            return self._run_to_target(target)

    def stop(self) -> str:
        """End the run at the next boundary, as Ctrl-C does; a held run ends normally."""
        with self._changed:
            state = self._checked_state()
            self._is_stopping = state != "holding"
            self._pause_request = self._target = None
            self._resume()
            if state in ("holding", "paused"):
                return "the run ends"
            return "stopping before the first step" if state == "loading" else STOPPING

    def queue_rewind(self, command: messages.RewindCommand) -> QueuedRewind:
        """Queue a rewind command for the next boundary. Raises `ControlError` if it cannot run."""
        with self._changed:
            if self._checked_state() == "loading":
                raise ControlError("No step has run yet.", hint="Wait for the first step.")
            if (active := self._active_rewind()) is not None:
                raise ControlError(
                    f"The previous {active.kind} has not finished yet.",
                    hint="Wait until the status shows its result.",
                )
            last = self._rewind_state
            queued = QueuedRewind(last.number + 1 if last is not None else 1, command)
            self._pending = queued
            self._rewind_state = RewindState(queued.number, queued.command.kind, "waiting")
            self._set_state(self._state)
            return queued

    def _active_rewind(self) -> RewindState | None:
        last = self._rewind_state
        return last if last is not None and last.state in ("waiting", "working") else None

    def _run_to_target(self, target: PauseTarget) -> str:
        with self._changed:
            if self._checked_state() == "holding":
                raise ControlError(
                    "The generation has ended, so there is no next step.",
                    hint="Restore or fork a step, or continue to end the run.",
                )
            self._pause_request, self._target = None, target
            self._resume()
            return f"pausing {target.describe()}"

    def _resume(self) -> None:
        self._pause_reason = None
        self._set_state("running" if self._state in ("paused", "holding") else self._state)

    def _checked_state(self) -> State:
        """Return the state. Raises `ControlError` when the run is over."""
        if self._state == "finished":
            raise ControlError("The run is over, so it takes no more commands.")
        return self._state

    def _visible_state(self) -> State:
        is_pausing = self._state == "running" and self._pause_request is not None
        return "pausing" if is_pausing else self._state

    def _describe(self, state: State, place: StepRef) -> str:
        """Return a state as a sentence; `place` is the last finished step."""
        last, until = self._rewind_state, self._describe_target()
        if self._is_stopping:
            return STOPPING
        if state == "paused":
            return f"paused {place.describe_after()}"
        if until and state in ("loading", "running"):
            return f"loading, and pausing {until}" if state == "loading" else f"pausing {until}"
        if state == "running" and last is not None and last.state == "working":
            return f"carrying out the {last.kind}"
        return _STATE_TEXTS.get(state, state)

    def _describe_target(self) -> str:
        """Return where the run will pause or end, empty without such a command."""
        if self._is_stopping or self._pause_request is not None:
            return "before the first step" if self._state == "loading" else "after this step"
        return self._target.describe() if self._target is not None else ""

    def _set_state(self, state: State) -> None:
        self._state = state
        self._update_has_work()
        self._changed.notify_all()

    def _update_has_work(self) -> None:
        requests = self._pause_request or self._target or self._pending or self._is_stopping
        is_waiting = self._waits_for_evaluation or self._paused_thread is not None
        self._has_work = bool(requests or is_waiting or self._is_start_position)


def pass_barrier(barrier: StepBarrier, place: StepRef) -> float:
    """Pass the barrier in a loop that cannot be rewound to another step.

    Returns the seconds for which it waited. Raises `KeyboardInterrupt` if the run has to stop.
    """
    started = time.perf_counter()
    while (command := barrier.between_steps(place)) is not None:
        error = ControlError("This loop cannot be rewound to another step.")
        barrier.report_result(command, error)
    return time.perf_counter() - started
