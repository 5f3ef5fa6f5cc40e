"""What a hit does to the step barrier, to a debugger, and to a run that no client can continue."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType, ModuleType
from typing import Any

import pytest
from support.controlled import wait_for
from support.patience import PATIENCE_S

from flexinspect.breakpoints.store import BreakpointHit, BreakpointStore
from flexinspect.control.messages import StepRef
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect_hooks.breakpoints.actions import EndRunAction, PauseAction
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.control.step_barrier import StepBarrier

STOPPING = "flexinspect_hooks.debugger.pdb_terminal"


class Debugger(ModuleType):
    """What stops a debugger, in the place of the real one."""

    def __init__(self, *, attached: bool) -> None:
        super().__init__(STOPPING)
        self.attached = attached
        self.stops: list[tuple[str, str, dict[str, Any]]] = []

    def can_stop(self) -> bool:
        return self.attached

    def stop_in(self, frame: FrameType, reason: str, facts: dict[str, Any]) -> bool:
        self.stops.append((frame.f_code.co_name, reason, facts))
        return self.attached


@pytest.fixture
def debugger(monkeypatch: pytest.MonkeyPatch) -> Debugger:
    made = Debugger(attached=True)
    monkeypatch.setitem(sys.modules, "pydevd", ModuleType("pydevd"))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(
        sys.modules, "flexinspect_hooks.debugger", ModuleType("flexinspect_hooks.debugger")
    )
    return made


def quietly(_: object) -> None:
    """Discard the message."""


def context(step: int) -> StepContext:
    return StepContext(0, step, "decode", 1, 10 + step, "basic", 0.0, 0.0)


def record(step: int) -> StepRecord:
    return StepRecord(0, step, "decode", 1, 10 + step, 11 + step, time.time(), 1.0, 0.1)


def begin_and_look(breaking: BreakpointEvaluator, step: int) -> None:
    observations = breaking.begin_step(context(step))
    breaking.evaluate_in_forward(observations, breaking.store.enabled(), sys._getframe())


def test_a_step_stops_the_debugger_at_its_beginning_and_not_again_at_its_end(
    debugger: Debugger,
) -> None:
    barrier, events = StepBarrier(), list[EventRecord]()
    store = BreakpointStore()
    store.add("step == 2")
    breaking = BreakpointEvaluator(
        store, PauseAction(barrier, quietly, events.append), events.append
    )
    assert breaking.stop_action.can_stop_in_forward()
    for step in range(4):
        begin_and_look(breaking, step)
        breaking.evaluate(record(step))
    ((frame, reason, facts),) = debugger.stops
    assert frame == "begin_and_look"
    assert reason == "Breakpoint 1, step == 2: step 2 (decode)."
    assert (facts["step"], facts["breakpoint"], facts["condition"]) == (2, 1, "step == 2")
    assert [event.kind for event in events] == ["breakpoint"]
    assert barrier.view().reason == ""
    assert store.list()[0].n_hits == 1


def test_what_is_known_after_the_step_stops_the_debugger_before_the_next(
    debugger: Debugger,
) -> None:
    barrier, events = StepBarrier(), list[EventRecord]()
    store = BreakpointStore()
    store.add("wall_ms > 0 and step == 1 [once]")
    stopper = PauseAction(barrier, quietly, events.append)
    breaking = BreakpointEvaluator(store, stopper, events.append)
    for step in range(3):
        stopper.deliver_hits(lambda: None, sys._getframe())
        begin_and_look(breaking, step)
        assert len(debugger.stops) == (step == 2)
        breaking.evaluate(record(step))
    ((_, reason, facts),) = debugger.stops
    assert reason.startswith("Breakpoint 1, wall_ms > 0 and step == 1: step 1 (decode): wall_ms")
    assert facts["step"] == 1
    assert [(event.kind, event.step) for event in events] == [("breakpoint", 1)]
    assert barrier.view().reason == ""


def test_without_a_client_the_barrier_pauses_when_the_step_is_over(debugger: Debugger) -> None:
    debugger.attached = False
    barrier, messages = StepBarrier(), list[str]()
    store = BreakpointStore()
    store.add("step == 0")
    store.add("q_len == 1")
    breaking = BreakpointEvaluator(store, PauseAction(barrier, messages.append, quietly))
    assert not breaking.stop_action.can_stop_in_forward()
    breaking.begin_step(context(0))
    breaking.evaluate(record(0))
    assert barrier.view().reason == (
        "breakpoint 1, step == 0: step 0 (decode); "
        "breakpoint 2, q_len == 1: step 0 (decode): q_len 1"
    )
    assert len(messages) == 1
    assert "flexinspect ctl continue --pid" in messages[0]
    assert debugger.stops == []


def test_a_client_that_leaves_just_then_lets_the_barrier_pause(debugger: Debugger) -> None:
    barrier = StepBarrier()
    debugger.attached = False
    hit = BreakpointHit(1, "step == 0", "step == 0: step 0", step=0)
    PauseAction(barrier, quietly, quietly).stop_in_forward(hit, sys._getframe())
    assert barrier.view().reason == "breakpoint 1, step == 0: step 0"


def test_without_a_debugger_none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydevd", "flexinspect_hooks.debugger.pdb_terminal", STOPPING):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not PauseAction(StepBarrier(), quietly, quietly).can_stop_in_forward()
    assert STOPPING not in sys.modules


def test_the_barrier_waits_for_evaluation_only_while_a_breakpoint_is_on() -> None:
    n_settled = 0

    def settle() -> None:
        nonlocal n_settled
        n_settled += 1

    barrier = StepBarrier()
    barrier.drain = settle
    store = BreakpointStore()
    BreakpointEvaluator(store, PauseAction(barrier, quietly, quietly))

    def walk() -> int:
        before = n_settled
        for step in range(3):
            barrier.between_steps(StepRef(0, 0, step))
        return n_settled - before

    assert walk() == 0
    store.add("step == 99")
    assert walk() == 3
    store.enable(1, False)
    assert walk() == 0
    store.enable(1, True)
    store.remove(1)
    assert walk() == 0


def test_steps_that_were_over_before_a_breakpoint_was_set_are_not_evaluated() -> None:
    barrier, store = StepBarrier(), BreakpointStore()
    breaking = BreakpointEvaluator(store, PauseAction(barrier, quietly, quietly))
    old = record(3)
    time.sleep(0.01)
    store.add("q_len == 1")
    breaking.evaluate(old)
    assert (barrier.view().reason, store.list()[0].n_hits) == ("", 0)
    breaking.evaluate(record(4))
    assert store.list()[0].n_hits == 1


def test_a_run_that_no_client_can_continue_is_stopped_once() -> None:
    barrier, events = StepBarrier(), list[EventRecord]()
    store = BreakpointStore()
    store.add("q_len == 1")
    stopper = EndRunAction(barrier, quietly, events.append)
    breaking = BreakpointEvaluator(store, stopper)
    breaking.evaluate(record(0))
    breaking.evaluate(record(1))
    assert [hit.step for hit in stopper.hits] == [0]
    assert [(event.kind, event.step) for event in events] == [("breakpoint", 0)]
    with pytest.raises(KeyboardInterrupt):
        barrier.between_steps(StepRef(0, 0, 1))


def test_a_run_that_has_received_a_command_pauses_instead() -> None:
    barrier, events = StepBarrier(), list[EventRecord]()
    barrier.has_received_command = True
    store = BreakpointStore()
    store.add("q_len == 1")
    stopper = EndRunAction(barrier, quietly, events.append)
    BreakpointEvaluator(store, stopper).evaluate(record(0))
    assert stopper.hits == ()
    assert barrier.view().reason.startswith("breakpoint 1, q_len == 1: step 0")


def test_a_finding_of_a_generations_end_is_recorded_once_and_says_that_it_pauses_when_it_does() -> (
    None
):
    messages, events, kinds = list[str](), list[EventRecord](), list[str]()
    barrier = StepBarrier()
    barrier.record_event = lambda kind, text, place, facts: kinds.append(kind)
    store = BreakpointStore()
    store.add("finding text.*")
    store.add("entropy > 3")
    breaking = BreakpointEvaluator(
        store, PauseAction(barrier, messages.append, events.append), events.append
    )
    found = Finding("text.stopped-at-once", Severity.WARNING, "It said nothing.", generation=2)
    breaking.evaluate_findings([found], 2)
    assert [(event.generation, event.step) for event in events] == [(2, None)]
    assert "the end of generation 2: text.stopped-at-once: It said nothing" in events[0].text
    assert messages == []
    model = threading.Thread(target=barrier.between_steps, args=(StepRef(2, 0, 0),))
    model.start()
    wait_for(lambda: barrier.view().state == "paused")
    assert [line.partition(", ")[0] for line in messages] == ["Paused at breakpoint 1"]
    barrier.continue_()
    model.join(PATIENCE_S)
    assert kinds == ["paused", "resumed"]


def test_a_breakpoint_that_is_set_while_another_is_spent_keeps_the_barrier_waiting() -> None:
    barrier, store = StepBarrier(), BreakpointStore()
    arming, going_on = threading.Event(), threading.Event()

    class Slow(PauseAction):
        def arm(self, on: bool) -> None:
            if not on and store.version:
                arming.set()
                going_on.wait(1)
            armed.append(on)

    armed: list[bool] = []
    breaking = BreakpointEvaluator(store, Slow(barrier, quietly, quietly))
    store.add("step == 0 [once]")
    writer = threading.Thread(target=breaking.evaluate, args=(record(0),))
    writer.start()
    assert arming.wait(5)
    server = threading.Thread(target=store.add, args=("step == 5",))
    server.start()
    server.join(0.1)
    going_on.set()
    for thread in (writer, server):
        thread.join(5)
    assert armed[-1] is True
