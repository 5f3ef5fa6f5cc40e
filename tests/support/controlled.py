"""Fakes for the tests of control: a model loop, levels, breakpoints and a rewind target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flexinspect.breakpoints.store import BreakpointStore
from flexinspect.control.messages import Cost, QueuedRewind, RewindCommand, StepRef
from flexinspect.core.errors import ControlError, FlexInspectError
from flexinspect_hooks.control.control_protocols import ControlTargets, SessionLevels
from flexinspect_hooks.control.step_barrier import StepBarrier
from support.patience import PATIENCE_S


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.0005)


class FakeModel:
    """A loop that passes the step barrier before each forward and waits for `forward`."""

    def __init__(self) -> None:
        self.barrier = StepBarrier()
        self.barrier.record_event = lambda kind, text, place, facts: self.events.append(kind)
        self.events: list[str] = []
        self.step, self.n_stops = -1, 0
        self._allowed = threading.Semaphore(0)
        self.is_at_forward = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            try:
                order = self.barrier.between_steps(StepRef(0, 0, self.step))
                # The code that the loop calls passes the barrier too.
                assert (
                    order is not None
                    or self.barrier.between_steps(StepRef(0, 0, self.step)) is None
                )
            except KeyboardInterrupt:
                self.n_stops += 1
                continue
            if order is not None:
                self._rewind(order)
                continue
            self.is_at_forward.set()
            self._allowed.acquire()
            self.step += 1

    def _rewind(self, order: QueuedRewind) -> None:
        place = order.command.place
        if place.step > self.step:
            self.barrier.report_result(order, FlexInspectError("That step is not recorded."))
            return
        self.step = place.step
        self.barrier.report_result(order, place, "there")

    def forward(self) -> None:
        """Run one forward, up to the next boundary."""
        self.is_at_forward.clear()
        self._allowed.release()
        self.settle()

    def settle(self) -> None:
        """Wait until the loop is paused or waits before a forward."""
        wait_for(lambda: self.is_settled)

    @property
    def is_settled(self) -> bool:
        return self.is_at_forward.is_set() or self.barrier.view().state == "paused"

    def end(self) -> None:
        self._is_over = True
        while self._thread.is_alive():
            self.barrier.view().state == "finished" or self.barrier.continue_()
            self._allowed.release()
            self._thread.join(0.01)


def fake_targets(model: FakeModel) -> ControlTargets:
    """Targets without a model, a trace or a recorder, except for the barrier of the fake model."""
    return ControlTargets(
        "generation",
        "no model",
        "/nowhere.flextrace",
        SessionLevels("advanced"),
        model.barrier,
        BreakpointStore(),
        FakeRewindTarget().estimate_cost,
    )


class FakeRewindTarget:
    """Accepts every step up to 1000, at a fixed cost."""

    def estimate_cost(self, command: RewindCommand) -> Cost:
        if command.place.step > 1000:
            raise ControlError("That step is not recorded.")
        return Cost("one forward", 0.01, 4096, False)
