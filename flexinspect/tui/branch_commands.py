"""The branches of a generation: make one by a rewind, choose one, compare one with its parent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import capitalize, escape_unprintable
from flexinspect.panels.base import Navigate
from flexinspect.tui.capture_commands import CaptureCommands, CaptureScreen
from flexinspect.tui.navigation import Navigation, PlacedScreen
from flexinspect.tui.screens.dialogs import (
    ask_choice,
    ask_edit,
    ask_fork,
    call_in_thread,
    format_branch,
)
from flexinspect.tui.trace_session import TraceSession

# The first screen does not need the messages of control.
if TYPE_CHECKING:
    from flexinspect.control.messages import (
        Restore,
        RewindCommand,
        RewindKind,
        RewindState,
        StepRef,
    )

COMMAND_POLL_S = 0.03
BRANCH_WAIT_S = 3.0
"""How long to wait for a new branch in the trace after the capture has reported it."""


class BranchScreen(PlacedScreen, CaptureScreen, Protocol):
    """What a rewind reads and changes of the screen of a trace."""


class BranchCommands:
    """Rewinds the model at the place, and shows branches of its generation."""

    def __init__(
        self,
        screen: BranchScreen,
        session: TraceSession,
        navigation: Navigation,
        commands: CaptureCommands,
    ) -> None:
        self._screen, self._session = screen, session
        self._navigation, self._commands = navigation, commands

    async def rewind(self, kind: RewindKind) -> None:
        """Restore the model to the current step, or fork there with another token or mask."""
        from flexinspect.control.messages import Restore, StepRef

        app, reader = self._screen.app, self._screen.reader
        place = self._screen.place  # it may follow the model while the user chooses
        if self._screen.status.last_step is None:
            app.notify("No token is generated yet.")
            return
        there = StepRef(place.generation, place.branch, place.step)
        if not await self._is_accepted(Restore(there, dry_run=True)):
            return
        command: RewindCommand | None = Restore(there) if kind == "restore" else None
        if command is None and reader is not None:
            ask = ask_fork if kind == "fork" else ask_edit
            command = await ask(app, reader, there)
        if command is not None:
            await self._run_with_cost(command)

    async def _is_accepted(self, trial: Restore) -> bool:
        """Ask the capture whether it can return to a place, and say why it cannot."""
        app, capture_status = self._screen.app, self._screen.capture_status
        status, generation = capture_status.status, trial.place.generation
        if status is not None and status.can_rewind and not capture_status.can_rewind(generation):
            running = status.place.generation + 1
            app.notify(
                f"Answer {generation + 1} is over. Only answer {running}, which the model is at, "
                f"can be forked, edited or restored; {app.keys_of('step.follow')} goes there."
            )
            return False
        return await self._commands.call(lambda client: client.rewind(trial)) is not None

    async def _run_with_cost(self, command: RewindCommand) -> None:
        """Run a command, after a question if it is expensive, and go to its result."""
        app, call = self._screen.app, self._commands.call
        trial = replace(command, dry_run=True)
        dry = await call(lambda client: client.rewind(trial))
        if dry is None:
            return
        if dry.cost is not None and dry.cost.is_expensive:
            options = [("do", "Re-run"), ("cancel", "Cancel")]
            question = f"Re-run from here? {escape_unprintable(capitalize(dry.cost.sentence))}"
            if await ask_choice(app, question, options) != "do":
                return
        response = await call(lambda client: client.rewind(command))
        if response is None or response.rewind_number is None:
            return
        cost_text = f"; {dry.cost.sentence}" if dry.cost is not None else ""
        app.notify(escape_unprintable(f"{response.message}{cost_text}"))
        rewind = await self._wait_for(response.rewind_number)
        if rewind is not None:
            await self._show_result(rewind)

    async def _wait_for(self, number: int) -> RewindState | None:
        """Wait until a command is done, for as long as the model takes."""
        screen = self._screen
        while screen.status.live:
            screen.capture_status = await asyncio.to_thread(screen.capture.poll)
            status = screen.capture_status.status
            rewind = status.last_rewind if status is not None else None
            if rewind and rewind.number == number and rewind.state in ("done", "failed"):
                return rewind
            await asyncio.sleep(COMMAND_POLL_S)
        return None

    async def _show_result(self, rewind: RewindState) -> None:
        """Notify how a command has ended, and go to the place that it led to."""
        failed = rewind.state == "failed"
        duration = f" ({1e3 * rewind.seconds:.0f} ms)" if rewind.seconds is not None else ""
        text = escape_unprintable(rewind.message or f"The {rewind.kind} is {rewind.state}.")
        severity = "error" if failed else "information"
        self._screen.app.notify(text + duration, severity=severity)
        if not failed and rewind.place is not None:
            await self._show_branch(rewind.place)

    async def _show_branch(self, there: StepRef) -> None:
        """Go to the place that a command led to, once its branch is in the trace."""
        for _ in range(round(BRANCH_WAIT_S / COMMAND_POLL_S)):
            reader = self._screen.reader
            with suppress(FlexInspectError):
                rows = reader.branches(there.generation) if reader is not None else ()
                if any(row.branch == there.branch for row in rows):
                    break
            await asyncio.sleep(COMMAND_POLL_S)
        place = self._screen.place
        if (there.generation, there.branch) == (place.generation, place.branch):
            self._navigation.navigate(Navigate(step=max(there.step, 0)))
        else:
            self._navigation.navigate(Navigate(generation=there.generation, branch=there.branch))
            self._navigation.follow()
            self._navigation.forked = there.branch

    async def choose_branch(self) -> None:
        """Choose a branch of the generation."""
        app, reader, place = self._screen.app, self._screen.reader, self._screen.place
        if reader is None:
            return
        rows = await call_in_thread(app, lambda: reader.branches(place.generation))
        if not rows or len(rows) < 2:
            app.notify(f"This generation has one branch; {self._fork_advice('forks it')}.")
            return
        options = [(str(row.branch), format_branch(row, place.branch)) for row in rows]
        answer = await ask_choice(app, "Show a branch", options)
        if answer is not None:
            branch = Navigate(generation=place.generation, branch=int(answer))
            self._navigation.navigate(branch)
            self._navigation.navigate(Navigate(step=place.step))

    def _fork_advice(self, effect: str) -> str:
        """Return the key that forks and its effect, or how to record a trace that can be forked."""
        if self._screen.status.live:
            return f"{self._screen.app.keys_of('travel.fork')} {effect}"
        return "this run has ended, and only one in progress can be forked (flexinspect run --hold)"

    def compare_branch(self) -> None:
        """Show the branch, or the last fork of it or of the trace, beside its parent."""
        app, source, place = self._screen.app, self._session.source, self._screen.place
        if source is None:
            return
        rows = source.reader.branches(place.generation)
        own = [row for row in rows if row.parent is not None and row.branch == place.branch]
        forks = own or [row for row in rows if row.parent == place.branch]
        row = forks[-1] if forks else source.reader.newest_fork()
        if row is None:
            advice = self._fork_advice("tries another token")
            app.notify(f"There is no fork to compare with; {advice}.")
            return
        from flexinspect.tui.comparison_data import Side
        from flexinspect.tui.screens.compare_screen import CompareScreen

        sides = (
            Side(source, row.parent or 0, f"branch {row.parent}"),
            Side(source, row.branch, f"branch {row.branch}"),
        )
        verdict = f"Branch {row.branch} and branch {row.parent}, of which it is a fork"
        if row.generation != place.generation:
            verdict += f", of answer {row.generation + 1}"
        there = replace(place, generation=row.generation, step=row.fork_step or 0, pos=None)
        app.push_screen(CompareScreen(sides, verdict, there))
