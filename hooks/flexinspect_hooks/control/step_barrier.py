"""The gate: the one place that decides whether the next forward may start.

The model's thread passes it between two steps. While nothing is wanted, passing costs one look at
an attribute. Commands come from other threads, never wait for the model, and answer with what will
happen; the state says when it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from flexinspect.control.messages import (
    PAUSE_REQUESTED,
    QueuedRewind,
    Restore,
    RewindCommand,
    RewindState,
    State,
    StepRef,
)
from flexinspect.core.errors import ControlError, FlexInspectError

RecordEvent = Callable[[str, str, StepRef, Mapping[str, Any]], None]
"""Records an event of the trace: its kind, its text, the last finished step, facts."""


class StepBarrier:
    """Pauses, steps and stops the model between its steps, and hands orders to the engine.

    `tell` records events; `settle` waits until every finished step is in the trace. Both may be set
    later. One gate serves all models of a process.
    """

    def __init__(
        self, record_event: RecordEvent | None = None, drain: Callable[[], None] | None = None
    ) -> None:
        self.record_event: RecordEvent = record_event or (lambda *_: None)
        self.drain: Callable[[], None] = drain or (lambda: None)
        self.stop_debugger: Callable[[str, Mapping[str, Any]], bool] = lambda reason, facts: False
        """Stops an attached debugger in this thread, until it goes on; False when there is none."""
        self._changed = threading.Condition(threading.RLock())
        self._paused_thread: int | None = None
        """The thread that is paused; others wait beside it, and only it takes orders."""
        self._has_work = True
        """Whether anything but going on is to be done at the next boundary: all the model reads."""
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
        """Whether the next place is where the model begins, or was put: no step led there."""
        self._rewind_started_at = 0.0
        self.has_received_command = False
        """Whether somebody has sent a command, who could also let a paused model go on."""

    # -- the model's side ------------------------------------------------------------------------

    def between_steps(self, place: StepRef) -> QueuedRewind | None:
        """Pass the gate; `place` is the last finished step.

        Returns at once while nothing is wanted, else when it is allowed to go on: with an order to
        obey, or None. A place that was passed before is passed at once, so that a loop and what it
        calls may both ask. Raises `KeyboardInterrupt` when the run is to stop.
        """
        if not self._has_work:
            self._passed_step = place
            return None
        return self._enter(place)

    def raise_if_stopping(self) -> None:
        """Raise `KeyboardInterrupt` when the run is to stop; nothing is passed or waited for."""
        with self._changed:
            self._raise_if_stopping()

    def hold(self, place: StepRef) -> QueuedRewind | None:
        """Keep the model alive at the end of the last generation.

        Returns an order to obey, or None when the run is to end.
        """
        self.drain()
        with self._changed:
            self._passed_step = self._last_step = (
                place  # nothing pauses there again, once it is let go
            )
            self._pause_request = self._target = self._pause_reason = None
            if self._is_stopping:
                return None
            self._set_state("holding")
            self.record_event(
                "holding", f"the model is kept alive {place.describe_after()}", place, {}
            )
            try:
                while self._state == "holding" and self._pending is None:
                    self._changed.wait()
                return self._take_rewind()
            finally:
                if self._state == "holding":
                    self._set_state("running")

    def report_result(
        self, order: QueuedRewind, result: StepRef | FlexInspectError, said: str = ""
    ) -> None:
        """Say what became of an order: where the model stands now, or why it was not obeyed.

        After a restore the model pauses there; after a failure it pauses again where it was.
        """
        error = result if isinstance(result, FlexInspectError) else None
        with self._changed:
            if isinstance(result, StepRef):
                self._last_step = result
            self._rewind_state = RewindState(
                order.number,
                order.kind,
                "failed" if error else "done",
                error.sentence() if error else said,
                self._last_step,
                round(time.monotonic() - self._rewind_started_at, 6),
            )
            was_paused, self._pause_reason = self._pause_reason is not None, None
            if was_paused if error else _pauses_afterwards(order.command):
                self._pause_request = PauseRequest(
                    f"the {order.kind} failed" if error else f"the {order.kind}"
                )
            self._update_has_work()

    def finish(self) -> None:
        """Say that nothing will run any more."""
        with self._changed:
            self._pending = self._pause_request = self._target = None
            order = self._rewind_state
            if order is not None and order.state in ("waiting", "working"):
                self._rewind_state = replace(order, state="failed", message="The run ended before.")
            self._set_state("finished")

    def pause_at_breakpoint(
        self,
        reason: str,
        facts: Mapping[str, Any] | None = None,
        kind: Literal["paused", "breakpoint"] = "breakpoint",
        on_paused: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause at the next boundary because something was met. From any thread.

        `reached` is called in the model's thread when it pauses there, which it may never.
        """
        with self._changed:
            if self._state not in ("holding", "finished"):
                self._pause_request = PauseRequest(reason, kind, facts or {}, on_paused)
                self._update_has_work()

    def wait_for_evaluation(self, on: bool) -> None:
        """While on, each boundary first waits until all finished steps are written.

        So that whoever judges steps as they are written can stop the model before the next one.
        """
        with self._changed:
            self._waits_for_evaluation = on
            self._update_has_work()

    def _enter(self, place: StepRef) -> QueuedRewind | None:
        if self._waits_for_evaluation and place != self._passed_step:
            self.drain()
        with self._changed:
            self._wait_for_other_thread()
            is_new = self._update_position(place)
            self._raise_if_stopping()
            if not is_new:
                return None
            if self._pending is not None:
                return self._take_rewind()
            if self._pause_request is None:
                return None
        self.drain()  # who hears of the pause finds every step up to it
        return None if self._stop_in_debugger(place) else self._pause(place)

    def _stop_in_debugger(self, place: StepRef) -> bool:
        """Let a debugger have the stop at a breakpoint, without the lock: it may take long."""
        stop = self._pause_request
        if stop is None or stop.kind != "breakpoint":
            return False
        if not self.stop_debugger(stop.reason, {**stop.facts, "step": place.step}):
            return False
        with self._changed:
            if self._pause_request is stop:
                self._pause_request = None
                self._update_has_work()
            said = f"stopped in the debugger {place.describe_after()}: {stop.reason}"
            self.record_event(stop.kind, said, place, stop.facts)
            self._raise_if_stopping()
        return True

    def _update_position(self, place: StepRef) -> bool:
        """Take in a place; False when it was passed already."""
        is_new, is_fresh = place != self._passed_step, self._is_start_position
        self._passed_step, self._last_step, self._is_start_position = place, place, False
        if self._state == "loading":
            self._state = "running"
        if is_new and self._target is not None and not is_fresh:
            reason = self._target.reason_to_pause(place)
            if reason is not None:
                self._pause_request, self._target = (
                    self._pause_request or PauseRequest(reason),
                    None,
                )
        self._update_has_work()
        return is_new

    def _raise_if_stopping(self) -> None:
        if self._is_stopping:
            self._is_stopping = False
            self._update_has_work()
            raise KeyboardInterrupt

    def _wait_for_other_thread(self) -> None:
        """Wait while another thread's model is paused."""
        while self._paused_thread not in (None, threading.get_ident()):
            self._changed.wait()

    def _pause(self, place: StepRef) -> QueuedRewind | None:
        with self._changed:
            self._wait_for_other_thread()
            if self._pause_request is None:
                return None  # it was taken back meanwhile
            try:
                return self._pause_here(place, self._pause_request)
            finally:
                self._paused_thread = None
                self._update_has_work()
                self._changed.notify_all()

    def _pause_here(self, place: StepRef, stop: PauseRequest) -> QueuedRewind | None:
        self._paused_thread, self._pause_request, self._pause_reason = (
            threading.get_ident(),
            None,
            stop,
        )
        self._passed_step = self._last_step = place  # another thread may have arrived since
        self._set_state("paused")
        self.record_event(
            stop.kind, f"paused {place.describe_after()}: {stop.reason}", place, stop.facts
        )
        stop.on_paused()
        self._wait_while_paused()
        if self._pending is not None:
            return self._take_rewind()
        self._pause_reason = None
        self._raise_if_stopping()
        self.record_event("continued", f"going on {place.describe_after()}", place, {})
        return None

    def _wait_while_paused(self) -> None:
        try:
            while self._state == "paused" and self._pending is None:
                self._changed.wait()
        finally:
            if self._state == "paused":  # an order, or Ctrl-C
                self._set_state("running")

    def _take_rewind(self) -> QueuedRewind | None:
        order, self._pending = self._pending, None
        if order is not None:
            self._rewind_started_at = time.monotonic()
            self._rewind_state = RewindState(order.number, order.kind, "working")
            self._passed_step, self._is_start_position = None, True
            self._set_state("running")
        return order

    # -- the side of those who command -----------------------------------------------------------

    def view(self) -> BarrierStatus:
        """Return how things stand."""
        with self._changed:
            # Passing at full speed leaves only this behind.
            passed = self._passed_step if self._passed_step is not None else self._last_step
            state = self._visible_state()
            stop = self._pause_reason if state == "paused" else self._pause_request
            reason = stop.reason if stop is not None else ""
            says = self._describe(state, passed)
            return BarrierStatus(
                state, passed, says, reason, self._describe_target(), self._rewind_state
            )

    def pause(self, reason: str = PAUSE_REQUESTED) -> str:
        """Pause at the next boundary; returns what will happen."""
        with self._changed:
            state = self._checked_state()
            if state == "holding":
                return "nothing runs: the generation is over and the model is kept alive"
            if state != "paused":
                self._pause_request = self._pause_request or PauseRequest(
                    reason
                )  # a hit that is about to pause says why
                self._update_has_work()
            return self._describe(self._visible_state(), self._last_step)

    def continue_(self) -> str:
        """Go on without a stop; a run that is held ends."""
        with self._changed:
            was = self._checked_state()
            self._pause_request = self._target = None
            self._resume()
            words = {"holding": "the run ends", "running": "it runs on, and will not pause"}
            return words.get(was, "going on")

    def step(self, n: int = 1) -> str:
        """Go on for `n` steps, then pause. Raises `ControlError` when there is no next step."""
        if n < 1:
            raise ControlError(f"{n} steps cannot be gone.", hint="Give a number from 1 on.")
        return self._run_to_target(PauseTarget(steps_left=n))

    def run_to(self, step: int, generation: int | None = None) -> str:
        """Go on until a step has finished, of the current generation unless another is named.

        Raises `ControlError` when that step is behind.
        """
        with self._changed:
            place = self.view().place
            target = PauseTarget(None, place.generation if generation is None else generation, step)
            if (place.generation, place.step) >= (target.generation, step):
                raise ControlError(
                    f"Step {step} of generation {target.generation} is behind: the model stands "
                    f"{place.describe_after()}.",
                    hint="Name a later step, or restore that one.",
                )
            return self._run_to_target(target)

    def stop(self) -> str:
        """End the run at the next boundary, as Ctrl-C does; a run that is held just ends."""
        with self._changed:
            was = self._checked_state()
            self._is_stopping = was != "holding"
            self._pause_request = self._target = None
            self._resume()
            if was in ("holding", "paused"):
                return "the run ends"
            return "stopping before the first step" if was == "loading" else STOPPING

    def queue_rewind(self, wish: RewindCommand) -> QueuedRewind:
        """Accept something for the engine to obey at the next boundary; one at a time.

        Raises `ControlError` while the model loads, after the end, and while another waits.
        """
        with self._changed:
            if self._checked_state() == "loading":
                raise ControlError("Nothing has run yet.", hint="Wait for the first step.")
            if self._rewind_state is not None and self._rewind_state.state in (
                "waiting",
                "working",
            ):
                raise ControlError(
                    f"The {self._rewind_state.kind} ordered before is not done yet.",
                    hint="Wait for it; the status tells.",
                )
            order = QueuedRewind(
                self._rewind_state.number + 1 if self._rewind_state is not None else 1, wish
            )
            self._pending = order
            self._rewind_state = RewindState(order.number, order.kind, "waiting")
            self._update_has_work()
            self._changed.notify_all()
            return order

    def _run_to_target(self, target: PauseTarget) -> str:
        with self._changed:
            if self._checked_state() == "holding":
                raise ControlError(
                    "The generation is over, so there is no next step.",
                    hint="Restore or fork a step, or continue to end the run.",
                )
            self._pause_request, self._target = None, target
            self._resume()
            return f"pausing {target.describe()}"

    def _resume(self) -> None:
        if self._state in ("paused", "holding"):
            self._state = "running"
        self._update_has_work()
        self._changed.notify_all()

    def _checked_state(self) -> State:
        """Return the state. Raises `ControlError` when the run is over."""
        if self._state == "finished":
            raise ControlError("The run is over; nothing can be controlled any more.")
        return self._state

    def _visible_state(self) -> State:
        return (
            "pausing"
            if self._state == "running" and self._pause_request is not None
            else self._state
        )

    def _describe(self, state: State, place: StepRef) -> str:
        is_working = self._rewind_state is not None and self._rewind_state.state == "working"
        kind = self._rewind_state.kind if self._rewind_state is not None and is_working else ""
        return describe_state(
            state, place, self._describe_target(), is_stopping=self._is_stopping, active_rewind=kind
        )

    def _describe_target(self) -> str:
        """Return where it will pause or end, empty when nothing is asked for."""
        if self._is_stopping or self._pause_request is not None:
            return "before the first step" if self._state == "loading" else "after this step"
        return self._target.describe() if self._target is not None else ""

    # -- both ------------------------------------------------------------------------------------

    def _set_state(self, state: State) -> None:
        self._state = state
        self._update_has_work()
        self._changed.notify_all()

    def _update_has_work(self) -> None:
        self._has_work = bool(
            self._pause_request
            or self._target
            or self._pending
            or self._is_stopping
            or self._waits_for_evaluation
            or self._is_start_position
            or self._paused_thread is not None
        )


def _pauses_afterwards(wish: RewindCommand) -> bool:
    return isinstance(wish, Restore) or wish.stay_paused


STOPPING: Final = "stopping after this step"

_STATE_TEXTS: Mapping[State, str] = {
    "loading": "loading",
    "running": "running",
    "pausing": "pausing after this step",
    "holding": "the generation is over, and the model is kept alive",
    "finished": "the run is over",
}


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A pause that is wanted or reached, and why; `reached` is called when it is."""

    reason: str
    kind: Literal["paused", "breakpoint"] = "paused"
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_paused: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """How the gate stands at one moment, as `Status` says it."""

    state: State
    place: StepRef
    description: str
    reason: str
    until: str
    last_rewind: RewindState | None


@dataclass(slots=True)
class PauseTarget:
    """Where to pause: after so many steps, or after one step of one generation."""

    steps_left: int | None = None
    generation: int = 0
    step: int = 0

    def describe(self) -> str:
        if self.steps_left is not None:
            return f"after {self.steps_left} more step{'s' if self.steps_left > 1 else ''}"
        of = f" of generation {self.generation}" if self.generation else ""
        return f"after step {self.step}{of}"

    def reason_to_pause(self, place: StepRef) -> str | None:
        """Return why to pause at a place that was just reached, None to go on."""
        if self.steps_left is not None:
            self.steps_left -= place.step >= 0
            return None if self.steps_left else PAUSE_REQUESTED
        if place.generation > self.generation:
            return f"generation {self.generation} ended before step {self.step}"
        is_there = place.generation == self.generation and place.step >= self.step
        return PAUSE_REQUESTED if is_there else None


def describe_state(
    state: State, place: StepRef, until: str, *, is_stopping: bool, active_rewind: str
) -> str:
    """Return a state as a sentence.

    `place` is the last finished step, `until` where it will pause, empty when nothing is asked for;
    `at_work_on` is the kind of the order that is being obeyed, if any.
    """
    if is_stopping:
        return STOPPING
    if state == "paused":
        return f"paused {place.describe_after()}"
    if state == "loading" and until:
        return f"loading, and pausing {until}"
    if state == "running" and until:
        return f"pausing {until}"
    if state == "running" and active_rewind:
        return f"at work on the {active_rewind}"
    return _STATE_TEXTS[state]
