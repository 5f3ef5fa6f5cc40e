"""Commands given from the interface: the requests, the messages, the new place."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from support.traces import sample_trace
from support.tui import screen_lines, screen_text, settle
from textual.pilot import Pilot
from textual.widgets import Input

from flexinspect.breakpoints.grammar import parse
from flexinspect.control.messages import (
    PAUSE_REQUESTED,
    BreakpointInfo,
    CommandResponse,
    Cost,
    EditMask,
    Fork,
    MaskEdit,
    RewindCommand,
    RewindState,
    StatusResponse,
    StepRef,
)
from flexinspect.core.errors import ControlError
from flexinspect.launch.child_process import CaptureState
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.capture_commands import CaptureCommands
from flexinspect.tui.navigation import Navigation
from flexinspect.tui.screens.breakpoints_screen import BreakpointsScreen, format_breakpoint
from flexinspect.tui.screens.dialogs import (
    ChoiceDialog,
    TextDialog,
    format_error,
    parse_forced_token,
)
from flexinspect.tui.trace_session import CaptureClient, CaptureStatus, TraceSession

SIZE = (100, 30)


class FakeCapture:
    """Answers as a capture does, and keeps the requests."""

    def __init__(self) -> None:
        self.state: Any = "running"
        self.reason = self.until = ""
        self.place = StepRef(0, 0, 2)
        self.level: Any = "advanced"
        self.requests: list[tuple[Any, ...]] = []
        self.stored: list[BreakpointInfo] = []
        self.cost = Cost("nothing to speak of")
        self.outcome = RewindState(1, "fork", "done", "branch 1 goes on", StepRef(0, 0, 1), 0.01)
        self.is_silent = False
        self.held = ""
        self._rewind: RewindState | None = None

    def client(self) -> FakeCapture:
        return self

    def call(self, command: Callable[[FakeCapture], Any]) -> Any:
        return command(self)

    def poll(self) -> CaptureStatus:
        if self.is_silent:
            return CaptureStatus(is_unresponsive=True)
        return CaptureStatus(self.status(), debugger_stop=self.held)

    def status(self) -> StatusResponse:
        until = self.until if self.state == "paused" else ""
        return StatusResponse(
            *(self.state, self.place, f"{self.state} now", self.reason, until),
            level=self.level,
            can_rewind=True,
            last_rewind=self._rewind,
        )

    def _answer(self, message: str, **more: Any) -> CommandResponse:
        return CommandResponse(message, self.status(), **more)

    def pause(self) -> CommandResponse:
        self.requests.append(("pause",))
        self.state = "paused"
        return self._answer("pausing after this step")

    def continue_(self) -> CommandResponse:
        self.requests.append(("continue",))
        self.state = "running"
        return self._answer("going on")

    def stop(self) -> CommandResponse:
        self.requests.append(("stop",))
        return self._answer("stopping after this step")

    def step(self, n: int) -> CommandResponse:
        self.requests.append(("step", n))
        return self._answer("pausing after the next step")

    def breakpoints(self) -> list[BreakpointInfo]:
        return self.stored

    def add_breakpoint(self, text: str) -> BreakpointInfo:
        parse(text)
        one = BreakpointInfo(len(self.stored) + 1, text)
        self.stored.append(one)
        return one

    def enable_breakpoint(self, number: int, on: bool) -> BreakpointInfo:
        self.stored = [
            structs.replace(b, is_enabled=on) if b.id == number else b for b in self.stored
        ]
        return self.stored[0]

    def remove_breakpoint(self, number: int) -> list[BreakpointInfo]:
        self.stored = [one for one in self.stored if one.id != number]
        return self.stored

    def rewind(self, command: RewindCommand) -> CommandResponse:
        if command.dry_run:
            return self._answer("it would", cost=self.cost)
        further: tuple[Any, ...] = ()
        if isinstance(command, Fork):
            further = (command.token_id, command.text)
        elif isinstance(command, EditMask):
            further = command.edits
        self.requests.append((command.kind, command.place, *further))
        self._rewind = self.outcome
        return self._answer("it will be done", rewind_number=1)


class Driven:
    """The interface on a growing trace, with a fake capture."""

    def __init__(self, app: InspectorApp, pilot: Pilot[Any], capture: FakeCapture) -> None:
        self.app, self.pilot, self.capture = app, pilot, capture

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not what():
                await self.pilot.pause(0.02)

    def shows(self, text: str) -> bool:
        return any(text in note.message for note in self.app._notifications)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace that this process is still writing, as far as readers can see."""
    path = sample_trace(tmp_path / "run.flextrace", generations=1, finish=False)
    with sqlite3.connect(path) as db:
        facts = (("pid", os.getpid()), ("started_at", time.time()))
        db.executemany("UPDATE run SET value = ? WHERE key = ?", [(str(v), k) for k, v in facts])
    return path


async def driven(app: InspectorApp, pilot: Pilot[Any]) -> Driven:
    capture, screen = FakeCapture(), app.screen
    screen.capture = capture  # type: ignore[attr-defined]
    await settle(pilot)
    return Driven(app, pilot, capture)


async def test_space_pauses_and_continues_and_the_header_shows_it(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("space")
        await here.until(lambda: "paused" in screen_lines(app)[0])
        assert not here.shows("pausing")
        await pilot.press("space")
        await here.until(lambda: ("continue",) in here.capture.requests)
        await here.until(lambda: "paused" not in screen_lines(app)[0])


async def test_a_pause_while_the_run_loads_is_confirmed(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        answered = threading.Event()

        def pause() -> CommandResponse:
            answered.wait(60)
            return here.capture._answer("loading, and pausing before the first step")

        here.capture.state, here.capture.pause = "loading", pause  # type: ignore[method-assign]
        await pilot.press("space")
        await here.until(
            lambda: here.shows("The run is busy. It will run the command when it is ready.")
        )
        answered.set()
        await here.until(lambda: here.shows("Loading, and pausing before the first step."))


async def test_a_requested_pause_shows_the_keys_once_and_changes_the_header(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.reason, here.capture.until = PAUSE_REQUESTED, "after this step"
        await pilot.press("space")
        await here.until(lambda: here.shows("Paused at token 3 · space continue · . one token"))
        app.clear_notifications()
        await pilot.press("space", "space")
        await here.until(lambda: here.capture.requests == [("pause",), ("continue",), ("pause",)])
        await here.until(lambda: "paused" in screen_lines(app)[0])
        await settle(pilot)
        assert not here.shows("paus")


async def test_the_header_names_the_level_as_it_is_by_now(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.level = "extreme"
        await here.until(lambda: "extreme" in screen_lines(app)[0])


def test_a_refusal_says_what_to_do_on_a_line_of_its_own() -> None:
    refused = ControlError("It is no[t].", hint="Do \x1b that.")
    assert format_error(refused) == "It is no[t].\nDo \\x1b that."


async def test_a_stop_says_why_and_how_to_continue(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.reason = "breakpoint 1, step == 2: step 2 (decode): token 7"
        here.capture.state = "paused"
        message = "Paused at token 3 · breakpoint `step == 2` · space continue · . one token"
        await here.until(lambda: here.shows(message))


async def test_the_full_stop_key_makes_one_token(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("home", "full_stop")
        await here.until(lambda: ("step", 1) in here.capture.requests)
        assert app.screen.following  # type: ignore[attr-defined]


async def test_a_held_model_that_cannot_pause_says_so(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.state = "holding"
        here.capture.pause = lambda: here.capture._answer("nothing is running")  # type: ignore[method-assign]
        await here.until(lambda: "model still loaded" in screen_lines(app)[0])
        await pilot.press("space")
        await here.until(lambda: here.shows("Nothing is running."))


async def test_a_run_of_another_process_is_asked_to_stop(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await here.until(lambda: app.screen.capture_status.status)  # type: ignore[attr-defined]
        await pilot.press("ctrl+c")
        await here.until(lambda: here.shows("Stopping after this step."))
        assert here.capture.requests == [("stop",)]


async def test_a_process_that_is_held_does_not_hold_the_interface(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.is_silent = True
        await here.until(lambda: "busy, no reply" in screen_lines(app)[0])
        await pilot.press("home", "right")
        assert app.screen.place.step == 1  # type: ignore[attr-defined]


async def test_the_place_of_a_debugger_stop_is_shown(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.held = "A debugger holds it in my_mask.py, line 3."
        await here.until(lambda: here.shows("my_mask.py, line 3"))
        await here.until(lambda: "held by a debugger" in screen_lines(app)[0])


async def test_a_trace_without_a_capture_refuses_commands_with_a_message(tmp_path: Path) -> None:
    app = InspectorApp(sample_trace(tmp_path / "done.flextrace"))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        here = Driven(app, pilot, FakeCapture())
        place = app.screen.place  # type: ignore[attr-defined]
        for key in ("space", ".", "F", "E", "R", "b"):
            await pilot.press(key)
            await here.until(lambda: here.shows("it has no model to control"))
            assert here.shows("To keep one: flexinspect run --hold")
            assert len(app.screen_stack) == 2
            assert app.screen.place == place  # type: ignore[attr-defined]
            app.notify("Next.")


def test_a_program_that_has_ended_its_trace_is_left_to_its_own_exit_code() -> None:
    requested: list[str] = []
    state = CaptureState(is_over=True)
    process: Any = SimpleNamespace(state=state, interrupt=lambda: requested.append("interrupt"))
    feed = TraceSession(process=process)
    feed.interrupt()
    assert not requested
    state.is_over = False
    feed.interrupt()
    assert requested


def test_a_loading_run_differs_from_one_that_takes_no_commands() -> None:
    capture = SimpleNamespace(pid=-1)
    feed: Any = SimpleNamespace(process=capture, path=None, exit_code=None, is_waiting=True)
    with pytest.raises(ControlError, match="still loading"):
        CaptureClient(feed).client()
    feed.is_waiting = False
    with pytest.raises(ControlError, match="--no-control"):
        CaptureClient(feed).client()


@pytest.mark.parametrize("to_list", ["down", "tab"])
async def test_breakpoints_are_set_switched_and_removed(path: Path, to_list: str) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("b")
        await here.until(lambda: isinstance(app.screen, BreakpointsScreen))
        await pilot.press(*"step == 12", "enter")
        await here.until(lambda: here.capture.stored)
        await here.until(lambda: "● 1  step == 12" in screen_text(app))
        await pilot.press(to_list, "enter")
        await here.until(lambda: "○ 1  step == 12" in screen_text(app))
        await pilot.press("x")
        await here.until(lambda: not here.capture.stored)


async def test_a_condition_that_cannot_be_read_is_shown_with_its_place(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("b")
        await here.until(lambda: isinstance(app.screen, BreakpointsScreen))
        await pilot.press(*"entropie > 3", "enter")
        await here.until(lambda: "^" in screen_text(app))
        assert "entropy" in screen_text(app)
        assert not here.capture.stored


async def test_tab_completes_a_name(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("b")
        await here.until(lambda: isinstance(app.screen, BreakpointsScreen))
        await pilot.press(*"entr")
        line = app.screen.query_one(Input)
        await here.until(lambda: line._suggestion)
        await pilot.press("tab")
        assert line.value == "entropy"


async def test_a_candidate_is_chosen_for_a_fork(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("home", "F")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("enter")
        await here.until(lambda: here.capture.requests)
        kind, place, token_id, text = here.capture.requests[0]
        assert (kind, place, text) == ("fork", StepRef(0, 0, 0), None)
        reader = app.session.reader  # type: ignore[union-attr]
        assert reader is not None
        chosen = reader.logits(0, 0).chosen_id  # type: ignore[union-attr]
        others = [one.token_id for one in reader.candidates(0, 0) if one.token_id != chosen]
        assert token_id == others[0]
        await here.until(lambda: here.shows("branch 1 goes on (10 ms)"))
        await here.until(lambda: app.screen.place.step == 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["F", "E", "R"])
async def test_an_answer_that_is_over_is_not_offered_for_a_fork(path: Path, key: str) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.place, here.capture.state = StepRef(2, 0, 2), "paused"
        await here.until(lambda: "paused" in screen_lines(app)[0])
        await here.until(lambda: "F " not in screen_lines(app)[-1])
        await pilot.press(key)
        message = "Answer 1 is over. Only answer 3, which the model is at, can be forked, edited"
        await here.until(lambda: here.shows(message))
        assert here.shows("f goes there")
        assert not isinstance(app.screen, ChoiceDialog)


async def test_a_place_that_the_capture_refuses_opens_no_list(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)

        def refuse(command: RewindCommand) -> CommandResponse:
            raise ControlError("That step is gone.")

        here.capture.rewind = refuse  # type: ignore[method-assign]
        await pilot.press("home", "F")
        await here.until(lambda: here.shows("That step is gone."))
        assert not isinstance(app.screen, ChoiceDialog)


async def test_the_end_of_a_fork_offers_to_compare_and_is_left_on_request(path: Path) -> None:
    app: Any = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        app.screen.navigation.forked = 1
        here.capture.place, here.capture.reason = StepRef(0, 1, 5), "branch 1 is finished"
        here.capture.state = "paused"
        message = (
            "Paused at token 6 · branch 1 is finished · space continue · . one token · C compare"
        )
        await here.until(lambda: here.shows(message))
        await pilot.press("space")
        await here.until(lambda: here.capture.requests == [("continue",)])
        assert app.screen.navigation.forked is None


async def test_a_fork_is_of_the_step_it_was_asked_on(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        screen: Any = app.screen
        await pilot.press("home", "F")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        screen.place = replace(screen.place, step=2)  # as following the model does
        await pilot.press("enter")
        await here.until(lambda: here.capture.requests)
        assert here.capture.requests[0][:2] == ("fork", StepRef(0, 0, 0))


async def test_a_typed_text_is_forced(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("home", "F")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("end", "enter")
        await here.until(lambda: isinstance(app.screen, TextDialog))
        await pilot.press("space", *"Rome", "enter")
        await here.until(lambda: here.capture.requests)
        assert here.capture.requests[0][2:] == (None, " Rome")


async def test_an_expensive_restore_is_confirmed_first(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.cost = Cost("900 tokens are recomputed, about 4 s", 4.0, is_expensive=True)
        await pilot.press("home", "R")
        await here.until(lambda: "about 4 s" in screen_text(app))
        await pilot.press("down", "enter")
        await here.until(lambda: not isinstance(app.screen, ChoiceDialog))
        assert not here.capture.requests
        await pilot.press("R")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("enter")
        await here.until(lambda: here.capture.requests == [("restore", StepRef(0, 0, 0))])


async def test_a_failed_rewind_says_why_and_keeps_the_place(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        here.capture.outcome = RewindState(1, "restore", "failed", "The weights have changed.")
        await pilot.press("home", "R")
        await here.until(lambda: here.shows("The weights have changed."))
        assert app.screen.place.step == 0  # type: ignore[attr-defined]


async def test_a_mask_is_edited_by_dialogs(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("home", "E")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("down", "enter")
        await here.until(lambda: "Which segment is dropped?" in screen_text(app))
        await pilot.press("down", "enter")
        await here.until(lambda: here.capture.requests)
        assert here.capture.requests[0][2] == MaskEdit("drop", segments=(1,))


async def test_a_cell_is_named_by_row_and_key(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("home", "E")
        await here.until(lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press(*["down"] * 6, "enter")
        await here.until(lambda: isinstance(app.screen, TextDialog))
        await pilot.press(*"9 4", "enter")
        await here.until(lambda: here.capture.requests)
        assert here.capture.requests[0][2] == MaskEdit("cell", row=9, key=4, is_open=False)


async def test_one_branch_says_how_to_make_another(path: Path) -> None:
    app = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        here = await driven(app, pilot)
        await pilot.press("t")
        await here.until(lambda: here.shows("F forks it"))


def test_a_number_sign_names_a_token_by_its_id() -> None:
    assert parse_forced_token("#42") == (42, None)
    assert parse_forced_token("42") == (None, "42")
    assert parse_forced_token(" #a") == (None, " #a")


def test_a_breakpoint_is_one_line() -> None:
    one = BreakpointInfo(3, "step == 2", False, 2, once=True, n_hits=4, note="judged late")
    assert format_breakpoint(one) == "○ 3  step == 2 [hits=2 once] · hit 4 times · judged late"


def test_refusals_are_errors_with_a_hint() -> None:
    assert ControlError("No.", hint="Wait.").sentence().startswith("No.")


async def test_the_answer_of_a_fork_stays_on_the_screen_when_the_run_continues(
    path: Path,
) -> None:
    app: Any = InspectorApp(path)
    async with app.run_test(size=SIZE) as pilot:
        await driven(app, pilot)
        screen = app.screen
        screen.following, screen.navigation.forked = True, 0
        more = replace(screen.status, generations=screen.status.generations + 1)
        screen.apply_status(more)
        assert (screen.place.generation, screen.following) == (0, False)
        (_, message), *_ = app.messages()
        assert message.startswith("Branch 0 is finished, and the run continues with the next")
        assert "f follows it" in message
        screen.following = True  # without a fork the next answer is followed
        screen.apply_status(replace(more, generations=more.generations))
        assert screen.place.generation == more.generations - 1


@pytest.mark.parametrize(
    ("state", "told"), [("holding", "Ending the run"), ("running", "Stopping after this step")]
)
def test_the_end_of_a_held_run_names_no_step(state: str, told: str) -> None:
    notes: list[str] = []
    screen: Any = SimpleNamespace(
        app=SimpleNamespace(notify=notes.append),
        capture_status=CaptureStatus(StatusResponse(state, StepRef(0, 0, 2), "")),  # type: ignore[arg-type]
        status=SimpleNamespace(live=True),
    )
    session: Any = SimpleNamespace(process=object(), is_stopping=False, interrupt=lambda: None)
    CaptureCommands(screen, session, Navigation.__new__(Navigation)).stop()
    assert notes == [f"{told}; press again to end it immediately."]
