"""What a hit does to the gate, to a debugger, and to a run that nobody can continue."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Any

import pytest

from flexinspect.breaks import BreakpointBook
from flexinspect.breaks.hits import BreakpointHit
from flexinspect.control.messages import Place
from flexinspect.records import EventRecord, StepRecord
from flexinspect_hooks.breaking import Breaking
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.control.gate import Gate
from flexinspect_hooks.stoppers import EndingStopper, GateStopper

STOPPING = "flexinspect_hooks.debugging.stopping"


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
        sys.modules, "flexinspect_hooks.debugging", ModuleType("flexinspect_hooks.debugging")
    )
    return made


def context(step: int) -> StepContext:
    return StepContext(0, step, "decode", 1, 10 + step, "basic", 0.0, 0.0)


def record(step: int) -> StepRecord:
    return StepRecord(0, step, "decode", 1, 10 + step, 11 + step, 0.0, 1.0, 0.1)


def begin_and_look(breaking: Breaking, step: int) -> None:
    sights = breaking.begin(context(step))
    breaking.look(sights, breaking.book.enabled(), sys._getframe())


def test_a_step_stops_the_debugger_at_its_beginning_and_not_again_at_its_end(
    debugger: Debugger,
) -> None:
    gate, events = Gate(), list[EventRecord]()
    book = BreakpointBook()
    book.add("step == 2")
    breaking = Breaking(book, GateStopper(gate), events.append)
    assert breaking.stopper.can_stop_inside()
    for step in range(4):
        begin_and_look(breaking, step)
        breaking.judge(record(step))
    ((frame, reason, facts),) = debugger.stops
    assert frame == "begin_and_look"
    assert reason == "Breakpoint 1, step == 2: step 2 (decode)."
    assert (facts["step"], facts["breakpoint"], facts["condition"]) == (2, 1, "step == 2")
    assert [event.kind for event in events] == ["breakpoint"]
    assert gate.view().reason == ""
    assert book.list()[0].n_hits == 1


def test_without_a_client_the_gate_pauses_when_the_step_is_over(debugger: Debugger) -> None:
    debugger.attached = False
    gate, said = Gate(), list[str]()
    book = BreakpointBook()
    book.add("step == 0")
    book.add("q_len == 1")
    breaking = Breaking(book, GateStopper(gate, said.append))
    assert not breaking.stopper.can_stop_inside()
    breaking.begin(context(0))
    breaking.judge(record(0))
    assert gate.view().reason == (
        "breakpoint 1, step == 0: step 0 (decode); "
        "breakpoint 2, q_len == 1: step 0 (decode): q_len 1"
    )
    assert len(said) == 1
    assert "flexinspect ctl continue --pid" in said[0]
    assert debugger.stops == []


def test_a_client_that_leaves_just_then_lets_the_gate_pause(debugger: Debugger) -> None:
    gate = Gate()
    debugger.attached = False
    hit = BreakpointHit(1, "step == 0", "step == 0: step 0", step=0)
    GateStopper(gate).stop_inside(hit, sys._getframe())
    assert gate.view().reason == "breakpoint 1, step == 0: step 0"


def test_without_a_debugger_none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydevd", "flexinspect_hooks.debugging.terminal", STOPPING):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not GateStopper(Gate()).can_stop_inside()
    assert STOPPING not in sys.modules


def test_the_gate_waits_for_judgement_only_while_a_breakpoint_is_on() -> None:
    n_settled = 0

    def settle() -> None:
        nonlocal n_settled
        n_settled += 1

    gate = Gate(settle=settle)
    book = BreakpointBook()
    Breaking(book, GateStopper(gate))

    def walk() -> int:
        before = n_settled
        for step in range(3):
            gate.between_steps(Place(0, 0, step))
        return n_settled - before

    assert walk() == 0
    book.add("step == 99")
    assert walk() == 3
    book.enable(1, False)
    assert walk() == 0
    book.enable(1, True)
    book.remove(1)
    assert walk() == 0


def test_a_run_that_nobody_can_continue_is_stopped_once() -> None:
    gate, events = Gate(), list[EventRecord]()
    book = BreakpointBook()
    book.add("q_len == 1")
    stopper = EndingStopper(gate, events.append)
    breaking = Breaking(book, stopper)
    breaking.judge(record(0))
    breaking.judge(record(1))
    assert [hit.step for hit in stopper.hits] == [0]
    assert [(event.kind, event.step) for event in events] == [("breakpoint", 0)]
    with pytest.raises(KeyboardInterrupt):
        gate.between_steps(Place(0, 0, 1))
