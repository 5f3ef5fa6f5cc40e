"""The gate: the one place that decides whether the next forward may start.

The model's thread passes it between two steps. While nothing is wanted, passing costs one look at
an attribute. Commands come from other threads, never wait for the model, and answer with what will
happen; the state says when it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from flexinspect.control.messages import ASKED, Order, OrderState, Place, Restore, State, Wish
from flexinspect.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.standing import STOPPING, GateView, Stop, Target, says

Tell = Callable[[str, str, Place, Mapping[str, Any]], None]
"""Records an event of the trace: its kind, its text, the last finished step, facts."""


class Gate:
    """Pauses, steps and stops the model between its steps, and hands orders to the engine.

    `tell` records events; `settle` waits until every finished step is in the trace. Both may be set
    later. One gate serves all models of a process.
    """

    def __init__(self, tell: Tell | None = None, settle: Callable[[], None] | None = None) -> None:
        self.tell: Tell = tell or (lambda *_: None)
        self.settle: Callable[[], None] = settle or (lambda: None)
        self.debug: Callable[[str, Mapping[str, Any]], bool] = lambda reason, facts: False
        """Stops an attached debugger in this thread, until it goes on; False when there is none."""
        self._changed = threading.Condition(threading.RLock())
        self._standing: int | None = None
        """The thread that is paused; others wait beside it, and only it takes orders."""
        self._wanted = True
        """Whether anything but going on is to be done at the next boundary: all the model reads."""
        self._state: State = "loading"
        self._passed: Place | None = None
        self._stop: Stop | None = None
        self._paused_for: Stop | None = None
        self._target: Target | None = None
        self._is_stopping = self._is_judging = False
        self._pending: Order | None = None
        self._order: OrderState | None = None
        self._last = Place()
        self._is_fresh = True
        """Whether the next place is where the model begins, or was put: no step led there."""
        self._began = 0.0
        self.is_commanded = False
        """Whether somebody has sent a command, who could also let a paused model go on."""

    # -- the model's side ------------------------------------------------------------------------

    def between_steps(self, place: Place) -> Order | None:
        """Pass the gate; `place` is the last finished step.

        Returns at once while nothing is wanted, else when it is allowed to go on: with an order to
        obey, or None. A place that was passed before is passed at once, so that a loop and what it
        calls may both ask. Raises `KeyboardInterrupt` when the run is to stop.
        """
        if not self._wanted:
            self._passed = place
            return None
        return self._stand(place)

    def end_if_stopping(self) -> None:
        """Raise `KeyboardInterrupt` when the run is to stop; nothing is passed or waited for."""
        with self._changed:
            self._end_if_stopping()

    def hold(self, place: Place) -> Order | None:
        """Keep the model alive at the end of the last generation.

        Returns an order to obey, or None when the run is to end.
        """
        self.settle()
        with self._changed:
            self._passed = self._last = place  # nothing pauses there again, once it is let go
            self._stop = self._target = self._paused_for = None
            if self._is_stopping:
                return None
            self._become("holding")
            self.tell("holding", f"the model is kept alive {place.after()}", place, {})
            try:
                while self._state == "holding" and self._pending is None:
                    self._changed.wait()
                return self._take_order()
            finally:
                if self._state == "holding":
                    self._become("running")

    def done(self, order: Order, result: Place | FlexInspectError, said: str = "") -> None:
        """Say what became of an order: where the model stands now, or why it was not obeyed.

        After a restore the model pauses there; after a failure it pauses again where it was.
        """
        error = result if isinstance(result, FlexInspectError) else None
        with self._changed:
            if isinstance(result, Place):
                self._last = result
            self._order = OrderState(
                order.number,
                order.kind,
                "failed" if error else "done",
                error.sentence() if error else said,
                self._last,
                round(time.monotonic() - self._began, 6),
            )
            was_paused, self._paused_for = self._paused_for is not None, None
            if was_paused if error else _stays(order.wish):
                self._stop = Stop(f"the {order.kind} failed" if error else f"the {order.kind}")
            self._look_ahead()

    def finish(self) -> None:
        """Say that nothing will run any more."""
        with self._changed:
            self._pending = self._stop = self._target = None
            order = self._order
            if order is not None and order.state in ("waiting", "working"):
                self._order = replace(order, state="failed", said="The run ended before.")
            self._become("finished")

    def stop_at(
        self,
        reason: str,
        facts: Mapping[str, Any] | None = None,
        kind: Literal["paused", "breakpoint"] = "breakpoint",
        reached: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause at the next boundary because something was met. From any thread.

        `reached` is called in the model's thread when it pauses there, which it may never.
        """
        with self._changed:
            if self._state not in ("holding", "finished"):
                self._stop = Stop(reason, kind, facts or {}, reached)
                self._look_ahead()

    def judge(self, on: bool) -> None:
        """While on, each boundary first waits until all finished steps are written.

        So that whoever judges steps as they are written can stop the model before the next one.
        """
        with self._changed:
            self._is_judging = on
            self._look_ahead()

    def _stand(self, place: Place) -> Order | None:
        if self._is_judging and place != self._passed:
            self.settle()
        with self._changed:
            self._stand_aside()
            is_new = self._arrive(place)
            self._end_if_stopping()
            if not is_new:
                return None
            if self._pending is not None:
                return self._take_order()
            if self._stop is None:
                return None
        self.settle()  # who hears of the pause finds every step up to it
        return None if self._was_debugged(place) else self._pause(place)

    def _was_debugged(self, place: Place) -> bool:
        """Let a debugger have the stop at a breakpoint, without the lock: it may take long."""
        stop = self._stop
        if stop is None or stop.kind != "breakpoint":
            return False
        if not self.debug(stop.reason, {**stop.facts, "step": place.step}):
            return False
        with self._changed:
            if self._stop is stop:
                self._stop = None
                self._look_ahead()
            said = f"stopped in the debugger {place.after()}: {stop.reason}"
            self.tell(stop.kind, said, place, stop.facts)
            self._end_if_stopping()
        return True

    def _arrive(self, place: Place) -> bool:
        """Take in a place; False when it was passed already."""
        is_new, is_fresh = place != self._passed, self._is_fresh
        self._passed, self._last, self._is_fresh = place, place, False
        if self._state == "loading":
            self._state = "running"
        if is_new and self._target is not None and not is_fresh:
            reason = self._target.reached(place)
            if reason is not None:
                self._stop, self._target = self._stop or Stop(reason), None
        self._look_ahead()
        return is_new

    def _end_if_stopping(self) -> None:
        if self._is_stopping:
            self._is_stopping = False
            self._look_ahead()
            raise KeyboardInterrupt

    def _stand_aside(self) -> None:
        """Wait while another thread's model is paused."""
        while self._standing not in (None, threading.get_ident()):
            self._changed.wait()

    def _pause(self, place: Place) -> Order | None:
        with self._changed:
            self._stand_aside()
            if self._stop is None:
                return None  # it was taken back meanwhile
            try:
                return self._stay(place, self._stop)
            finally:
                self._standing = None
                self._look_ahead()
                self._changed.notify_all()

    def _stay(self, place: Place, stop: Stop) -> Order | None:
        self._standing, self._stop, self._paused_for = threading.get_ident(), None, stop
        self._passed = self._last = place  # another thread may have arrived since
        self._become("paused")
        self.tell(stop.kind, f"paused {place.after()}: {stop.reason}", place, stop.facts)
        stop.reached()
        self._wait()
        if self._pending is not None:
            return self._take_order()
        self._paused_for = None
        self._end_if_stopping()
        self.tell("continued", f"going on {place.after()}", place, {})
        return None

    def _wait(self) -> None:
        try:
            while self._state == "paused" and self._pending is None:
                self._changed.wait()
        finally:
            if self._state == "paused":  # an order, or Ctrl-C
                self._become("running")

    def _take_order(self) -> Order | None:
        order, self._pending = self._pending, None
        if order is not None:
            self._began = time.monotonic()
            self._order = OrderState(order.number, order.kind, "working")
            self._passed, self._is_fresh = None, True
            self._become("running")
        return order

    # -- the side of those who command -----------------------------------------------------------

    def view(self) -> GateView:
        """Return how things stand."""
        with self._changed:
            # Passing at full speed leaves only this behind.
            passed = self._passed if self._passed is not None else self._last
            state = self._shown()
            stop = self._paused_for if state == "paused" else self._stop
            reason = stop.reason if stop is not None else ""
            says = self._says(state, passed)
            return GateView(state, passed, says, reason, self._until(), self._order)

    def pause(self, reason: str = ASKED) -> str:
        """Pause at the next boundary; returns what will happen."""
        with self._changed:
            state = self._running_state()
            if state == "holding":
                return "nothing runs: the generation is over and the model is kept alive"
            if state != "paused":
                self._stop = self._stop or Stop(reason)  # a hit that is about to pause says why
                self._look_ahead()
            return self._says(self._shown(), self._last)

    def continue_(self) -> str:
        """Go on without a stop; a run that is held ends."""
        with self._changed:
            was = self._running_state()
            self._stop = self._target = None
            self._release()
            words = {"holding": "the run ends", "running": "it runs on, and will not pause"}
            return words.get(was, "going on")

    def step(self, n: int = 1) -> str:
        """Go on for `n` steps, then pause. Raises `ControlError` when there is no next step."""
        if n < 1:
            raise ControlError(f"{n} steps cannot be gone.", hint="Give a number from 1 on.")
        return self._go_to(Target(left=n))

    def run_to(self, step: int, generation: int | None = None) -> str:
        """Go on until a step has finished, of the current generation unless another is named.

        Raises `ControlError` when that step is behind.
        """
        with self._changed:
            place = self.view().place
            target = Target(None, place.generation if generation is None else generation, step)
            if (place.generation, place.step) >= (target.generation, step):
                raise ControlError(
                    f"Step {step} of generation {target.generation} is behind: the model stands "
                    f"{place.after()}.",
                    hint="Name a later step, or restore that one.",
                )
            return self._go_to(target)

    def stop(self) -> str:
        """End the run at the next boundary, as Ctrl-C does; a run that is held just ends."""
        with self._changed:
            was = self._running_state()
            self._is_stopping = was != "holding"
            self._stop = self._target = None
            self._release()
            if was in ("holding", "paused"):
                return "the run ends"
            return "stopping before the first step" if was == "loading" else STOPPING

    def order(self, wish: Wish) -> Order:
        """Accept something for the engine to obey at the next boundary; one at a time.

        Raises `ControlError` while the model loads, after the end, and while another waits.
        """
        with self._changed:
            if self._running_state() == "loading":
                raise ControlError("Nothing has run yet.", hint="Wait for the first step.")
            if self._order is not None and self._order.state in ("waiting", "working"):
                raise ControlError(
                    f"The {self._order.kind} ordered before is not done yet.",
                    hint="Wait for it; the status tells.",
                )
            order = Order(self._order.number + 1 if self._order is not None else 1, wish)
            self._pending = order
            self._order = OrderState(order.number, order.kind, "waiting")
            self._look_ahead()
            self._changed.notify_all()
            return order

    def _go_to(self, target: Target) -> str:
        with self._changed:
            if self._running_state() == "holding":
                raise ControlError(
                    "The generation is over, so there is no next step.",
                    hint="Restore or fork a step, or continue to end the run.",
                )
            self._stop, self._target = None, target
            self._release()
            return f"pausing {target.words()}"

    def _release(self) -> None:
        if self._state in ("paused", "holding"):
            self._state = "running"
        self._look_ahead()
        self._changed.notify_all()

    def _running_state(self) -> State:
        """Return the state. Raises `ControlError` when the run is over."""
        if self._state == "finished":
            raise ControlError("The run is over; nothing can be controlled any more.")
        return self._state

    def _shown(self) -> State:
        return "pausing" if self._state == "running" and self._stop is not None else self._state

    def _says(self, state: State, place: Place) -> str:
        is_working = self._order is not None and self._order.state == "working"
        kind = self._order.kind if self._order is not None and is_working else ""
        return says(state, place, self._until(), is_stopping=self._is_stopping, at_work_on=kind)

    def _until(self) -> str:
        """Return where it will pause or end, empty when nothing is asked for."""
        if self._is_stopping or self._stop is not None:
            return "before the first step" if self._state == "loading" else "after this step"
        return self._target.words() if self._target is not None else ""

    # -- both ------------------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        self._state = state
        self._look_ahead()
        self._changed.notify_all()

    def _look_ahead(self) -> None:
        self._wanted = bool(
            self._stop
            or self._target
            or self._pending
            or self._is_stopping
            or self._is_judging
            or self._is_fresh
            or self._standing is not None
        )


def _stays(wish: Wish) -> bool:
    return isinstance(wish, Restore) or wish.stays
