"""Control of a running capture: pause, step, breakpoints, stop, and the question at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flexinspect.core.text import escape_unprintable
from flexinspect.tui.navigation import Navigation
from flexinspect.tui.screens.dialogs import ask_choice, call_in_thread
from flexinspect.tui.trace_session import CaptureClient, CaptureStatus, RunStatus, TraceSession

# The first screen does not need the messages of control.
if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import CommandResponse, StatusResponse

T = TypeVar("T")

NOTIFY_AFTER_S = 0.4
"""If the header shows the effect of a command by then, its message is not shown."""


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
        response = await self.call(command)
        if response is None:
            return
        screen = self._screen
        screen.capture_status = CaptureStatus(response.status)
        if response.status.until:
            await asyncio.sleep(NOTIFY_AFTER_S)
        # The header shows a pause that the command has led to.
        if not (response.status.until and screen.capture_status.state == "paused"):
            screen.app.notify(f"{escape_unprintable(response.message)}.")

    def toggle_pause(self) -> Awaitable[None]:
        """Pause after this step, or continue."""
        is_paused = self._screen.capture_status.state in ("paused", "pausing")
        return self._run(lambda client: client.continue_() if is_paused else client.pause())

    def step_once(self) -> Awaitable[None]:
        """Let the model generate one token, and show it."""
        if not self._screen.following:
            self._navigation.follow()
        return self._run(lambda client: client.step(1))

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
        keys = f"{app.keys_of('run.pause')} continues, {app.keys_of('run.step')} runs one step"
        show_reason = status.reason and not is_requested
        reason = f": {escape_unprintable(status.reason)}" if show_reason else ""
        app.notify(f"{escape_unprintable(status.description)}{reason}. {keys}.")

    def stop(self) -> Awaitable[None] | None:
        """Ask the run to end after this step; the second time, kill it."""
        screen, process = self._screen, self._session.process
        is_live = screen.status.live
        if process is None and is_live and screen.capture_status.status is not None:
            return self._run(lambda client: client.stop())
        if process is None or not is_live:
            screen.app.notify(f"Nothing is running; {screen.app.keys_of('app.quit')} quits.")
        elif self._session.is_stopping:
            process.kill()
        else:
            self._session.interrupt()
            message = "Stopping after this step; press again to end the run immediately."
            screen.app.notify(message)
        return None

    async def quit(self) -> None:
        """Close the interface; ask first what a run that it started shall do."""
        app, session = self._screen.app, self._session
        if session.process is not None and self._screen.status.live:
            answer = await self._ask_about_run()
            if answer == "end":
                session.is_ending = True
            elif answer == "stop":
                session.interrupt()
            elif answer != "leave":
                return
            elif not session.detach():
                message = "This run cannot continue without the interface."
                app.notify(message, severity="warning")
                return
        app.exit()

    async def _ask_about_run(self) -> str | None:
        """Ask whether the run stops or continues; one that only holds its model is ended."""
        if self._screen.capture_status.state == "holding":
            return "end" if await self.call(lambda client: client.stop()) else "stop"
        options = [
            ("stop", "Stop the run after this step and quit; the trace stays valid"),
            ("stay", "Continue"),
            ("leave", "Quit, and let the run continue by itself"),
        ]
        return await ask_choice(self._screen.app, "The model is still running.", options)
