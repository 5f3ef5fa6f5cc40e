"""The step barrier: commands in any order leave the model in the expected state."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.controlled import FakeModel, wait_for
from support.patience import PATIENCE_S

from flexinspect.control.messages import Fork, Restore, StatusResponse, StepRef
from flexinspect.core.errors import ControlError
from flexinspect_hooks.control.step_barrier import StepBarrier


class BarrierMachine(RuleBasedStateMachine):
    """Compares the barrier with a minimal model of its behaviour."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FakeModel()
        self.barrier = self.model.barrier
        self.model.settle()
        self.step, self.n_stops = -1, 0
        self.is_paused = self.wants_pause = self.wants_stop = False
        self.left: int | None = None
        self.until: int | None = None
        self.waiting: Restore | Fork | None = None

    def teardown(self) -> None:
        self.model.end()

    # -- commands -------------------------------------------------------------------------------

    @rule()
    def pause(self) -> None:
        message = self.barrier.pause()
        if not self.is_paused:
            self.wants_pause = True
        is_paused = self.is_paused and not self.wants_stop
        assert ("paused" in message) == is_paused or "stopping" in message

    @rule()
    def continue_(self) -> None:
        self.barrier.continue_()
        self._released()

    @rule(n=st.integers(1, 3))
    def take_steps(self, n: int) -> None:
        self.barrier.step(n)
        self._released()
        self.left = n

    @rule(step=st.integers(0, 12))
    def run_to(self, step: int) -> None:
        if step <= self.step:
            with pytest.raises(ControlError, match="already finished"):
                self.barrier.run_to(step)
            return
        self.barrier.run_to(step)
        self._released()
        self.until = step

    @rule()
    def stop(self) -> None:
        self.barrier.stop()
        if self.is_paused:
            self._released()
            self.n_stops += 1
        else:
            self._forget()
            self.wants_stop = True

    @rule(step=st.integers(-1, 6), is_fork=st.booleans())
    def rewind(self, step: int, is_fork: bool) -> None:
        place = StepRef(0, 0, step)
        command = Fork(place, token_id=1) if is_fork else Restore(place)
        if self.waiting is not None:
            with pytest.raises(ControlError, match="has not finished yet"):
                self.barrier.queue_rewind(command)
            return
        self.barrier.queue_rewind(command)
        self.waiting = command
        if self.is_paused:
            self._rewind_now()
            wait_for(lambda: self.barrier.view().last_rewind.state in ("done", "failed"))  # type: ignore[union-attr]

    @rule(n=st.integers(1, 3))
    def forwards(self, n: int) -> None:
        for _ in range(n):
            if not self.is_paused:
                self._forward()
                self.state_matches()

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

    # -- expected behaviour ----------------------------------------------------------------------

    def _forget(self) -> None:
        self.wants_pause, self.left, self.until = False, None, None

    def _released(self) -> None:
        self.is_paused = False
        self._forget()
        if self.waiting is None:
            wait_for(lambda: self.barrier.view().state != "paused")

    def _at_boundary(self) -> None:
        if self.wants_stop:
            self.wants_stop = False
            self.n_stops += 1
            return  # the model is at the same place again, and passes it
        if self.waiting is not None:
            self._rewind_now()
        elif self.wants_pause:
            self.is_paused, self.wants_pause = True, False

    def _rewind_now(self) -> None:
        command, self.waiting = self.waiting, None
        assert command is not None
        if command.place.step > self.step:
            self.is_paused |= self.wants_pause
        else:
            if self.is_paused and isinstance(command, Fork):
                self.left = self.until = None  # it runs to the end of the branch instead
            self.step = command.place.step
            self.is_paused = isinstance(command, Restore) or self.wants_pause
        self.wants_pause &= not self.is_paused

    @invariant()
    def state_matches(self) -> None:
        def state() -> str:
            if self.is_paused:
                return "paused"
            return "pausing" if self.wants_pause else "running"

        wait_for(lambda: self.model.is_settled and self.barrier.view().state == state())
        wait_for(lambda: (self.model.step, self.model.n_stops) == (self.step, self.n_stops))
        if self.is_paused:
            assert self.barrier.view().place == StepRef(0, 0, self.step)


BarrierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCommands = pytest.mark.timeout(120)(BarrierMachine.TestCase)


def test_a_barrier_without_commands_reads_one_attribute() -> None:
    barrier = StepBarrier()
    assert barrier.between_steps(StepRef(0, 0, -1)) is None
    barrier._changed = None  # type: ignore[assignment] # taking the lock would fail
    assert barrier.between_steps(StepRef(0, 0, 0)) is None
    assert barrier.between_steps(StepRef(0, 0, 1)) is None


def test_a_breakpoint_pauses_before_the_next_step_and_says_why() -> None:
    model = FakeModel()
    model.settle()
    model.barrier.pause_at_breakpoint("entropy > 3", {"entropy": 3.2})
    assert model.barrier.view().state == "pausing"
    model.forward()
    view = model.barrier.view()
    assert (view.state, view.description, view.reason) == (
        "paused",
        "paused after step 0",
        "entropy > 3",
    )
    assert model.events == ["breakpoint"]
    model.end()


def test_other_threads_wait_for_a_paused_one_and_take_no_rewind_commands() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, -1))
    barrier.pause()
    results: list[tuple[int, object]] = []

    def passes(step: int) -> threading.Thread:
        place = StepRef(0, 0, step)
        call = lambda: results.append((step, barrier.between_steps(place)))  # noqa: E731
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        return thread

    first = passes(0)
    wait_for(lambda: barrier.view().state == "paused")
    second = passes(7)
    second.join(0.1)
    assert (results, barrier.view().place) == ([], StepRef(0, 0, 0))
    queued = barrier.queue_rewind(Restore(StepRef(0, 0, -1)))
    for thread in (first, second):
        thread.join(PATIENCE_S)
    assert sorted(results, key=str) == [(0, queued), (7, None)]


def test_wait_for_evaluation_writes_a_step_before_the_next_one_starts() -> None:
    written = []
    barrier = StepBarrier()
    barrier.drain = lambda: written.append("drained")
    barrier.between_steps(StepRef(0, 0, -1))
    barrier.wait_for_evaluation(True)
    barrier.between_steps(StepRef(0, 0, 0))
    barrier.between_steps(StepRef(0, 0, 0))
    assert written == ["drained"]
    barrier.wait_for_evaluation(False)
    barrier.between_steps(StepRef(0, 0, 1))
    assert written == ["drained"]


def test_the_target_of_a_rewind_does_not_count_as_a_step() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, 3))
    barrier.step(2)
    barrier.queue_rewind(Fork(StepRef(0, 0, 1), token_id=7))
    queued = barrier.between_steps(StepRef(0, 0, 4))
    assert queued is not None
    barrier.report_result(queued, StepRef(0, 0, 1))
    assert barrier.between_steps(StepRef(0, 0, 1)) is None
    assert barrier.view().description == "pausing after the next step"


def forked_in_a_pause(barrier: StepBarrier, *, then: Callable[[], object]) -> None:
    """Carry out a fork that is ordered in a pause, with a command before it is done."""
    barrier.pause()
    order = Fork(StepRef(0, 0, 1), token_id=7)
    threading.Timer(0.02, lambda: barrier.queue_rewind(order)).start()
    queued = barrier.between_steps(StepRef(0, 0, 3))
    assert queued is not None
    then()
    barrier.report_result(queued, StepRef(0, 1, 0), "Branch 1.")


def test_a_fork_in_a_pause_pauses_again_at_the_end_of_its_branch() -> None:
    barrier = StepBarrier()
    forked_in_a_pause(barrier, then=lambda: None)
    state = barrier.view().last_rewind
    assert state is not None
    assert state.message == "Branch 1. The model waits at the end of this branch."
    for step in (0, 1):
        assert barrier.between_steps(StepRef(0, 1, step)) is None
        assert barrier.view().description == "pausing at the end of this branch"
    seen: list[StatusResponse] = []

    def look_and_continue() -> None:
        wait_for(lambda: barrier.view().state == "paused")
        seen.append(barrier.view())
        barrier.continue_()

    threading.Thread(target=look_and_continue).start()
    assert barrier.between_steps(StepRef(0, 1, 2), ends_branch=True) is None
    assert (seen[0].place, seen[0].reason) == (StepRef(0, 1, 2), "branch 1 is finished")
    assert (barrier.view().state, barrier.view().until) == ("running", "")


def test_a_command_after_the_fork_replaces_the_pause_at_its_end() -> None:
    for command, until in (("continue_", ""), ("step", "after the next step")):
        barrier = StepBarrier()
        forked_in_a_pause(barrier, then=getattr(barrier, command))
        assert barrier.view().until == until


def test_a_fork_of_a_running_model_does_not_pause() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, 2))
    barrier.queue_rewind(Fork(StepRef(0, 0, 1), token_id=7))
    queued = barrier.between_steps(StepRef(0, 0, 3))
    assert queued is not None
    barrier.report_result(queued, StepRef(0, 1, 0))
    assert barrier.between_steps(StepRef(0, 1, 1), ends_branch=True) is None
    assert barrier.view().state == "running"


def test_a_restore_pauses_and_names_its_token() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, 19))
    barrier.queue_rewind(Restore(StepRef(0, 0, 15)))
    queued = barrier.between_steps(StepRef(0, 0, 20))
    assert queued is not None
    barrier.report_result(queued, StepRef(0, 0, 15))
    assert barrier.view().reason == "restored to token 16"


def test_run_to_a_step_beyond_the_generation_pauses_at_the_next_one() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, -1))
    barrier.run_to(12)
    barrier.between_steps(StepRef(0, 0, 5))
    assert barrier.view().state == "running"
    threading.Timer(0.05, barrier.continue_).start()
    barrier.between_steps(StepRef(1, 0, 0))
    assert barrier.view().state == "running"


def test_a_held_model_ends_normally_when_it_is_released() -> None:
    for command in ("continue_", "stop"):
        barrier = StepBarrier()
        barrier.between_steps(StepRef(0, 0, -1))
        ended: list[object] = []
        thread = threading.Thread(
            target=lambda b=barrier, e=ended: e.append(b.hold(StepRef(0, 0, 3)))
        )
        thread.start()
        wait_for(lambda b=barrier: b.view().state == "holding")
        with pytest.raises(ControlError, match="no next step"):
            barrier.step()
        assert getattr(barrier, command)() == "the run ends"
        thread.join(PATIENCE_S)
        assert ended == [None]
        barrier.pause_at_breakpoint("a finding of the generation's end")
        assert barrier.between_steps(StepRef(0, 0, 3)) is None  # no pause at the end


def test_a_finished_run_refuses_commands_and_a_queued_rewind_fails() -> None:
    barrier = StepBarrier()
    barrier.between_steps(StepRef(0, 0, -1))
    barrier.queue_rewind(Restore(StepRef(0, 0, -1)))
    barrier.finish()
    rewind = barrier.view().last_rewind
    assert rewind is not None
    assert (rewind.state, rewind.message) == ("failed", "The run ended first.")
    for command in (barrier.pause, barrier.continue_, barrier.step, barrier.stop):
        with pytest.raises(ControlError, match="over"):
            command()
