"""The gate between two steps: whatever is commanded, and in whatever order, the state is right."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.controlled import PATIENCE_S, FakeModel, wait_for

from flexinspect.control.messages import Fork, Restore, StepRef
from flexinspect.core.errors import ControlError
from flexinspect_hooks.control.step_barrier import StepBarrier


class GateMachine(RuleBasedStateMachine):
    """Beside the gate runs the plainest description of what it should do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FakeModel()
        self.gate = self.model.gate
        self.model.settle()
        self.step, self.n_stops = -1, 0
        self.is_paused = self.wants_pause = self.wants_stop = False
        self.left: int | None = None
        self.until: int | None = None
        self.waiting: Restore | Fork | None = None

    def teardown(self) -> None:
        self.model.end()

    # -- what is commanded -----------------------------------------------------------------------

    @rule()
    def pause(self) -> None:
        said = self.gate.pause()
        if not self.is_paused:
            self.wants_pause = True
        assert ("paused" in said) == (self.is_paused and not self.wants_stop) or "stopping" in said

    @rule()
    def go_on(self) -> None:
        self.gate.continue_()
        self._released()

    @rule(n=st.integers(1, 3))
    def go_some(self, n: int) -> None:
        self.gate.step(n)
        self._released()
        self.left = n

    @rule(step=st.integers(0, 12))
    def go_to(self, step: int) -> None:
        if step <= self.step:
            with pytest.raises(ControlError, match="is behind"):
                self.gate.run_to(step)
            return
        self.gate.run_to(step)
        self._released()
        self.until = step

    @rule()
    def stop(self) -> None:
        self.gate.stop()
        if self.is_paused:
            self._released()
            self.n_stops += 1
        else:
            self._forget()
            self.wants_stop = True

    @rule(step=st.integers(-1, 6), is_fork=st.booleans())
    def order(self, step: int, is_fork: bool) -> None:
        place = StepRef(0, 0, step)
        wish = Fork(place, token_id=1) if is_fork else Restore(place)
        if self.waiting is not None:
            with pytest.raises(ControlError, match="not done yet"):
                self.gate.queue_rewind(wish)
            return
        self.gate.queue_rewind(wish)
        self.waiting = wish
        if self.is_paused:
            self._obey()
            wait_for(lambda: self.gate.view().last_rewind.state in ("done", "failed"))  # type: ignore[union-attr]

    @rule(n=st.integers(1, 3))
    def forwards(self, n: int) -> None:
        for _ in range(n):
            if not self.is_paused:
                self._forward()
                self.all_is_as_it_should()

    def _forward(self) -> None:
        self.model.forward()
        self.step += 1
        if self.left is not None:
            self.left -= 1
            self.wants_pause |= self.left == 0
            self.left = self.left or None
        if self.until is not None and self.step >= self.until:
            self.wants_pause, self.until = True, None
        self._at_boundary()

    # -- what should become of it ----------------------------------------------------------------

    def _forget(self) -> None:
        self.wants_pause, self.left, self.until = False, None, None

    def _released(self) -> None:
        self.is_paused = False
        self._forget()
        if self.waiting is None:
            wait_for(lambda: self.gate.view().state != "paused")

    def _at_boundary(self) -> None:
        if self.wants_stop:
            self.wants_stop = False
            self.n_stops += 1
            return  # it is at the same place then, and passes
        if self.waiting is not None:
            self._obey()
        elif self.wants_pause:
            self.is_paused, self.wants_pause = True, False

    def _obey(self) -> None:
        wish, self.waiting = self.waiting, None
        assert wish is not None
        if wish.place.step > self.step:
            self.is_paused |= self.wants_pause
        else:
            self.step = wish.place.step
            self.is_paused = isinstance(wish, Restore) or self.wants_pause
        self.wants_pause &= not self.is_paused

    @invariant()
    def all_is_as_it_should(self) -> None:
        def state() -> str:
            if self.is_paused:
                return "paused"
            return "pausing" if self.wants_pause else "running"

        wait_for(lambda: self.model.stands and self.gate.view().state == state())
        wait_for(lambda: (self.model.step, self.model.n_stops) == (self.step, self.n_stops))
        if self.is_paused:
            assert self.gate.view().place == StepRef(0, 0, self.step)


GateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCommands = pytest.mark.timeout(120)(GateMachine.TestCase)


def test_a_gate_that_nothing_wants_only_looks_at_one_attribute() -> None:
    gate = StepBarrier()
    assert gate.between_steps(StepRef(0, 0, -1)) is None
    gate._changed = None  # type: ignore[assignment] # whoever took the lock would fail
    assert gate.between_steps(StepRef(0, 0, 0)) is None
    assert gate.between_steps(StepRef(0, 0, 1)) is None


def test_a_breakpoint_pauses_before_the_next_step_and_says_why() -> None:
    model = FakeModel()
    model.settle()
    model.gate.pause_at_breakpoint("entropy > 3", {"entropy": 3.2})
    assert model.gate.view().state == "pausing"
    model.forward()
    view = model.gate.view()
    assert (view.state, view.description, view.reason) == (
        "paused",
        "paused after step 0",
        "entropy > 3",
    )
    assert model.events == ["breakpoint"]
    model.end()


def test_while_one_thread_is_paused_the_others_wait_and_take_no_orders() -> None:
    gate = StepBarrier()
    gate.between_steps(StepRef(0, 0, -1))
    gate.pause()
    answers: list[tuple[int, object]] = []

    def passes(step: int) -> threading.Thread:
        place = StepRef(0, 0, step)
        call = lambda: answers.append((step, gate.between_steps(place)))  # noqa: E731
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        return thread

    first = passes(0)
    wait_for(lambda: gate.view().state == "paused")
    second = passes(7)
    second.join(0.1)
    assert (answers, gate.view().place) == ([], StepRef(0, 0, 0))
    order = gate.queue_rewind(Restore(StepRef(0, 0, -1)))
    for thread in (first, second):
        thread.join(PATIENCE_S)
    assert sorted(answers, key=str) == [(0, order), (7, None)]


def test_judged_steps_are_written_before_the_next_one_starts() -> None:
    written = []
    gate = StepBarrier(drain=lambda: written.append("settled"))
    gate.between_steps(StepRef(0, 0, -1))
    gate.wait_for_evaluation(True)
    gate.between_steps(StepRef(0, 0, 0))
    gate.between_steps(StepRef(0, 0, 0))
    assert written == ["settled"]
    gate.wait_for_evaluation(False)
    gate.between_steps(StepRef(0, 0, 1))
    assert written == ["settled"]


def test_a_place_that_the_model_was_put_to_counts_as_no_step() -> None:
    gate = StepBarrier()
    gate.between_steps(StepRef(0, 0, 3))
    gate.step(2)
    gate.queue_rewind(Fork(StepRef(0, 0, 1), token_id=7))
    order = gate.between_steps(StepRef(0, 0, 4))
    assert order is not None
    gate.report_result(order, StepRef(0, 0, 1))
    assert gate.between_steps(StepRef(0, 0, 1)) is None
    assert gate.view().description == "pausing after 1 more step"


def test_a_run_to_a_step_of_a_generation_that_ends_before_pauses_at_the_next_one() -> None:
    gate = StepBarrier()
    gate.between_steps(StepRef(0, 0, -1))
    gate.run_to(12)
    gate.between_steps(StepRef(0, 0, 5))
    assert gate.view().state == "running"
    threading.Timer(0.05, gate.continue_).start()
    gate.between_steps(StepRef(1, 0, 0))
    assert gate.view().state == "running"


def test_a_held_model_ends_when_it_is_let_go_and_not_as_an_interrupt() -> None:
    for verb in ("continue_", "stop"):
        gate = StepBarrier()
        gate.between_steps(StepRef(0, 0, -1))
        ended: list[object] = []
        thread = threading.Thread(target=lambda g=gate, e=ended: e.append(g.hold(StepRef(0, 0, 3))))
        thread.start()
        wait_for(lambda g=gate: g.view().state == "holding")
        with pytest.raises(ControlError, match="no next step"):
            gate.step()
        assert getattr(gate, verb)() == "the run ends"
        thread.join(PATIENCE_S)
        assert ended == [None]
        gate.pause_at_breakpoint("a finding of the generation's end")
        assert gate.between_steps(StepRef(0, 0, 3)) is None  # it pauses no more, at its end


def test_nothing_is_commanded_once_the_run_is_over_and_a_waiting_order_fails() -> None:
    gate = StepBarrier()
    gate.between_steps(StepRef(0, 0, -1))
    gate.queue_rewind(Restore(StepRef(0, 0, -1)))
    gate.finish()
    order = gate.view().last_rewind
    assert order is not None
    assert (order.state, order.message) == ("failed", "The run ended before.")
    for command in (gate.pause, gate.continue_, gate.step, gate.stop):
        with pytest.raises(ControlError, match="over"):
            command()
