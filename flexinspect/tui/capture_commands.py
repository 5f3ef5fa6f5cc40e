"""Control of a running capture: pause, step, breakpoints, stop, and the question at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flexinspect.core.text import capitalize, escape_unprintable
from flexinspect.tui.navigation import Navigation
from flexinspect.tui.screens.dialogs import ask_choice, call_in_thread
from flexinspect.tui.status_lines import is_at_branch_end, pause_message
from flexinspect.tui.trace_session import CaptureClient, CaptureStatus, RunStatus, TraceSession

# The first screen does not need the messages of control.
if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import CommandResponse, StatusResponse

T = TypeVar("T")

POLL_EVERY_S = 0.05
ANSWER_S = 0.5
"""Seconds after which a notification says that a command has no answer yet."""


class CaptureScreen(Protocol):
    """What the control of a capture reads and changes of the screen of its trace."""

    capture: CaptureClient
    capture_status: CaptureStatus
    status: RunStatus
    following: bool

    @property
    def app(self) -> Any: ...


class CaptureCommands:
    """Sends commands to the capture, and shows how it answers."""

    def __init__(
        self, screen: CaptureScreen, session: TraceSession, navigation: Navigation
    ) -> None:
        self._screen, self._session, self._navigation = screen, session, navigation
        self._has_shown_pause_hint = False

    async def call(self, command: Callable[[ControlClient], T]) -> T | None:
        """Run a command in a thread; show an error of it and return None."""
        screen = self._screen
        return await call_in_thread(screen.app, lambda: screen.capture.call(command))

    async def _run(self, command: Callable[[ControlClient], CommandResponse]) -> None:
        """Run a command; its effect is in the header, except for a held model or one that loads."""
        # While a program imports torch it does not answer, and the header shows no step.
        call = asyncio.ensure_future(self.call(command))
        _, late = await asyncio.wait([call], timeout=ANSWER_S)
        if late:
            self._screen.app.notify("The run is busy. It will run the command when it is ready.")
        response = await call
        if response is not None:
            self._screen.capture_status = CaptureStatus(response.status)
            if response.status.state in ("holding", "loading"):
                self._notify_response(response)

    def _notify_response(self, response: CommandResponse) -> None:
        self._screen.app.notify(f"{escape_unprintable(capitalize(response.message))}.")

    def toggle_pause(self) -> Awaitable[None]:
        """Pause after this step, or continue."""
        is_paused = self._screen.capture_status.state in ("paused", "pausing")
        self._leave_finished_branch()
        return self._run(lambda client: client.continue_() if is_paused else client.pause())

    def step_once(self) -> Awaitable[None]:
        """Let the model generate one token, and show it."""
        self._leave_finished_branch()
        if not self._screen.following:
            self._navigation.follow()
        return self._run(lambda client: client.step(1))

    def _leave_finished_branch(self) -> None:
        """Follow the model to the next answer, which a user asks for after the end of a fork."""
        status = self._screen.capture_status.status
        if status is not None and is_at_branch_end(status):
            self._navigation.forked = None

    async def edit_breakpoints(self) -> None:
        """List, set and remove breakpoints."""
        from flexinspect.tui.screens.breakpoints_screen import BreakpointsScreen

        screen = self._screen
        breakpoints = await self.call(lambda client: client.breakpoints())
        if breakpoints is not None:
            await screen.app.push_screen_wait(BreakpointsScreen(screen.capture, breakpoints))

    def notify_paused(self, status: StatusResponse) -> None:
        """Notify why the capture has paused; if the user asked for it, only once."""
        from flexinspect.control.messages import PAUSE_REQUESTED

        app, is_requested = self._screen.app, status.reason == PAUSE_REQUESTED
        if is_requested and self._has_shown_pause_hint:
            return
        self._has_shown_pause_hint = True
        keys = {"run.pause": "continue", "run.step": "one token"}
        if is_at_branch_end(status):
            keys |= {"branch.compare": "compare", "travel.fork": "fork again"}
        app.notify(
            pause_message(status, [f"{app.keys_of(key)} {text}" for key, text in keys.items()])
        )

    def stop(self) -> Awaitable[None] | None:
        """Ask the run to end after this step; the second time, kill it."""
        screen, process = self._screen, self._session.process
        is_live = screen.status.live
        if process is None and is_live and screen.capture_status.status is not None:
            return self._stop_other_process()
        if process is None or not is_live:
            screen.app.notify(f"Nothing is running; {screen.app.keys_of('app.quit')} quits.")
        elif self._session.is_stopping:
            process.kill()
        else:
            self._session.interrupt()
            is_held = screen.capture_status.state == "holding"
            what = "Ending the run" if is_held else "Stopping after this step"
            screen.app.notify(f"{what}; press again to end it immediately.")
        return None

    async def _stop_other_process(self) -> None:
        response = await self.call(lambda client: client.stop())
        if response is not None:
            self._notify_response(response)

    async def quit(self) -> None:
        """Close the interface; ask first what a run that it started shall do."""
        if await self._may_leave("quit"):
            self._screen.app.leave_trace()

    async def open_instead(self, path: Path) -> None:
        """Open another trace in place of this one, once a run that is to be stopped has ended."""
        screen, session = self._screen, self._session
        if await self._may_leave("open the other trace"):
            while session.process and screen.status.live and not session.is_detached:
                await asyncio.sleep(POLL_EVERY_S)
            screen.app.open_instead(screen, path)

    async def _may_leave(self, purpose: str) -> bool:
        """Ask what happens to a run in progress; return whether its screen can be left."""
        session = self._session
        if session.process is None or not self._screen.status.live:
            return True
        answer = await self._ask_about_run(purpose)
        if answer == "end":
            session.is_ending = True
        elif answer == "stop":
            session.interrupt()
        elif answer != "leave":
            return False
        elif not session.detach():
            message = "This run cannot continue without the interface."
            self._screen.app.notify(message, severity="warning")
            return False
        return True

    async def _ask_about_run(self, purpose: str) -> str | None:
        """Ask whether the run stops or continues; one that only holds its model is ended."""
        if self._screen.capture_status.state == "holding":
            return "end" if await self.call(lambda client: client.stop()) else "stop"
        is_paused = self._screen.capture_status.state == "paused"
        question = f"The run is not finished{' (paused)' if is_paused else ''}."
        options = [
            ("stop", f"Stop the run after this step and {purpose}; the trace stays valid"),
            ("stay", "Stay here"),
            ("leave", f"{capitalize(purpose)}, and let the run continue by itself"),
        ]
        return await ask_choice(self._screen.app, question, options)
