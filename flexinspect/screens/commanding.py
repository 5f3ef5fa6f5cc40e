"""A screen that commands the capture behind its trace: pause, step, break, restore, fork, edit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from textual import work
from textual.app import App
from textual.reactive import reactive

from flexinspect.errors import FlexInspectError
from flexinspect.panels.base import Go, Place
from flexinspect.screens.ask import Choose
from flexinspect.screens.breakpoints import BreakpointsScreen
from flexinspect.screens.forking import ask_token
from flexinspect.screens.maskedit import ask_edit
from flexinspect.screens.remote import Remote, Standing
from flexinspect.screens.reviewing import ReviewingScreen
from flexinspect.text import visible

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import Answer, Cost, OrderState, Status
    from flexinspect.control.messages import Place as LivePlace
    from flexinspect.trace.reader import TraceReader

POLL_S = 0.25
"""How often the capture is asked how it stands while it runs: a millisecond of a thread."""

SLOW_S = 0.4
"""A command whose effect the header shows by then is not answered in words as well."""

ORDER_POLL_S = 0.03
BRANCH_WAIT_S = 3.0
"""How long the steps of a new branch are waited for, once it was said to be there."""

T = TypeVar("T")


class CommandingScreen(ReviewingScreen):
    """What the keys of control do. The screen below it says where the user is."""

    standing: reactive[Standing] = reactive(Standing(), repaint=False, init=False)
    remote: Remote
    _has_paused = False
    """Whether the keys that go on were told."""

    # What the trace screen owns.
    place: Any
    following: Any

    @property
    def reader(self) -> TraceReader | None:
        """The trace, as far as there is one."""
        raise NotImplementedError

    @property
    def is_live(self) -> bool:
        """Whether the trace may still grow."""
        raise NotImplementedError

    def go(self, go: Go) -> None:
        """Go to a place of the trace."""
        raise NotImplementedError

    def follow(self) -> None:
        """Follow the newest step."""
        raise NotImplementedError

    def keys_of(self, name: str) -> str:
        """Return the keys of an action as the user has them."""
        raise NotImplementedError

    # -- how it stands ---------------------------------------------------------------------------

    @work(exclusive=True, group="standing")
    async def watch_capture(self) -> None:
        """Know how the capture stands while there is one."""
        while self.is_live:
            self.standing = await asyncio.to_thread(self.remote.look)
            await asyncio.sleep(POLL_S)
        self.standing = Standing()

    def watch_standing(self, old: Standing, new: Standing) -> None:
        """Say that it has paused, and why: the header has no room for reasons."""
        status = new.status
        if status is not None and new.state == "paused" and old.state != "paused":
            self._say_paused(status)
        if new.held and new.held != old.held:
            self.notify(visible(new.held), severity="warning", markup=False)
        elif new.is_silent and not old.is_silent:
            self.notify(
                "The model's process does not answer; a debugger may hold it.",
                severity="warning",
                markup=False,
            )

    def _say_paused(self, status: Status) -> None:
        """Say why it has paused; that it does so when it was asked to, once."""
        from flexinspect.control.messages import ASKED

        is_asked = status.reason == ASKED
        if is_asked and self._has_paused:
            return
        self._has_paused = True
        going_on = f"{self.keys_of('run.pause')} goes on, {self.keys_of('run.step')} steps"
        why = f": {visible(status.reason)}" if status.reason and not is_asked else ""
        self.notify(f"{visible(status.says)}{why}. {going_on}.", markup=False)

    def tell_of_debugger(self, said: deque[str]) -> None:
        """Say where a debugger may come to the run, and what it cannot do; takes what it says."""
        while said:
            self.notify(visible(said.popleft()), timeout=15, markup=False)

    # -- commands --------------------------------------------------------------------------------

    async def ask(self, ask: Callable[[ControlClient], T]) -> T | None:
        """Ask the capture something beside the interface; a refusal is shown, and None."""
        try:
            return await asyncio.to_thread(lambda: self.remote.ask(ask))
        except FlexInspectError as error:
            self.notify(refusal_words(error), severity="error", markup=False, timeout=10)
            return None

    @work(group="command")
    async def _command(self, ask: Callable[[ControlClient], Answer]) -> None:
        answer = await self.ask(ask)
        if answer is not None:
            self.standing = Standing(answer.status)
            if answer.status.until:
                await asyncio.sleep(SLOW_S)
            if not self._is_there(answer.status.until):
                self.notify(f"{visible(answer.said)}.", markup=False)

    def _is_there(self, until: str) -> bool:
        """Whether the model stands by now where a command was to bring it: the header says so."""
        return bool(until) and self.standing.state == "paused"

    def pause_or_go(self) -> None:
        """Pause after this step, or go on."""
        if self.standing.state in ("paused", "pausing"):
            self._command(lambda client: client.continue_())
        else:
            self._command(lambda client: client.pause())

    def step_once(self) -> None:
        """Let the model make one token, and show it."""
        self.follow()
        self._command(lambda client: client.step(1))

    @work(group="dialog")
    async def edit_breakpoints(self) -> None:
        """List, set and remove breakpoints."""
        found = await self.ask(lambda client: client.breakpoints())
        if found is not None:
            await self.app.push_screen_wait(BreakpointsScreen(self.remote, found))

    # -- travels ---------------------------------------------------------------------------------

    @work(group="dialog")
    async def restore_step(self) -> None:
        """Put the model back to right after the step shown."""
        from flexinspect.control.messages import Place as LivePlace

        there = _live(self.place, LivePlace)
        await self._travel(lambda client, dry: client.restore(there, dry_run=dry))

    @work(group="dialog")
    async def fork_step(self) -> None:
        """Choose another token for the step shown; the model goes on from there as a branch."""
        await self._elsewhere(
            ask_token,
            lambda client, there, token, dry: client.fork(
                there, token_id=token.token_id, text=token.text, dry_run=dry
            ),
        )

    @work(group="dialog")
    async def edit_mask(self) -> None:
        """Change the mask; the model goes on from the step shown as a branch."""
        await self._elsewhere(
            ask_edit,
            lambda client, there, edit, dry: client.edit_mask(there, (edit,), dry_run=dry),
        )

    async def _elsewhere(
        self,
        choose: Callable[[App[Any], TraceReader, Place], Awaitable[T | None]],
        order: Callable[[ControlClient, LivePlace, T, bool], Answer],
    ) -> None:
        """Let the user choose what is to be otherwise at the step shown, and order that."""
        from flexinspect.control.messages import Place as LivePlace

        if self.reader is None:
            return
        shown = self.place  # it may follow the model while the user chooses
        chosen = await choose(self.app, self.reader, shown)
        if chosen is not None:
            there = _live(shown, LivePlace)
            await self._travel(lambda client, dry: order(client, there, chosen, dry))

    async def _travel(self, ask: Callable[[ControlClient, bool], Answer]) -> None:
        """Say what an order costs if that is much, give it, and go where it led."""
        dry = await self.ask(lambda client: ask(client, True))
        if dry is None or not await self._agreed(dry.cost):
            return
        given = await self.ask(lambda client: ask(client, False))
        if given is None or given.order is None:
            return
        said = f"; {dry.cost.sentence}" if dry.cost is not None else ""
        self.notify(visible(f"{given.said}{said}"), markup=False)
        await self._arrive(await self._outcome(given.order))

    async def _agreed(self, cost: Cost | None) -> bool:
        if cost is None or not cost.is_dear:
            return True
        options = [("do", "Do it"), ("leave", "Leave it")]
        question = visible(cost.sentence)
        return await self.app.push_screen_wait(Choose(question, options)) == "do"

    async def _outcome(self, number: int) -> OrderState | None:
        """Wait until an order is done, for as long as the model takes."""
        while self.is_live:
            standing = await asyncio.to_thread(self.remote.look)
            self.standing = standing
            order = standing.status.order if standing.status is not None else None
            if order is not None and order.number == number and order.state in ("done", "failed"):
                return order
            await asyncio.sleep(ORDER_POLL_S)
        return None

    async def _arrive(self, order: OrderState | None) -> None:
        if order is None:
            return
        failed = order.state == "failed"
        took = f" ({1e3 * order.seconds:.0f} ms)" if order.seconds is not None else ""
        text = visible(order.said or f"The {order.kind} is {order.state}.")
        self.notify(text + took, severity="error" if failed else "information", markup=False)
        if not failed and order.place is not None:
            await self._show(order.place)

    async def _show(self, there: LivePlace) -> None:
        """Go to where an order led, once its branch is in the trace."""
        for _ in range(round(BRANCH_WAIT_S / ORDER_POLL_S)):
            if self.reader is not None and _has_branch(self.reader, there):
                break
            await asyncio.sleep(ORDER_POLL_S)
        place: Place = self.place
        if there.branch == place.branch and there.generation == place.generation:
            self.go(Go(step=max(there.step, 0)))
            return
        self.go(Go(generation=there.generation, branch=there.branch))
        self.follow()

    # -- branches --------------------------------------------------------------------------------

    @work(group="dialog")
    async def choose_branch(self) -> None:
        """Choose one of the generation's branches."""
        reader, place = self.reader, self.place
        if reader is None:
            return
        rows = await self._read(lambda: reader.branches(place.generation))
        if not rows or len(rows) < 2:
            fork = self.keys_of("travel.fork")
            self.notify(f"This generation has one branch; {fork} forks it.", markup=False)
            return
        options = [(str(row.branch), branch_words(row, place.branch)) for row in rows]
        answer = await self.app.push_screen_wait(Choose("Show a branch", options))
        if answer is not None:
            self.go(Go(generation=place.generation, branch=int(answer)))
            self.go(Go(step=place.step))

    async def _read(self, read: Callable[[], T]) -> T | None:
        try:
            return await asyncio.to_thread(read)
        except FlexInspectError as error:
            self.notify(refusal_words(error), severity="error", markup=False)
            return None

    def commands(self) -> dict[str, Callable[[], object]]:
        """Return what each action of control does."""
        return {
            "run.pause": self.pause_or_go,
            "run.step": self.step_once,
            "run.breakpoints": self.edit_breakpoints,
            "travel.restore": self.restore_step,
            "travel.fork": self.fork_step,
            "travel.mask": self.edit_mask,
            "branch.choose": self.choose_branch,
        }


def refusal_words(error: FlexInspectError) -> str:
    """Return what an error says, with its hint on a line of its own."""
    return "\n".join(map(visible, filter(None, (error.message, error.hint))))


def branch_words(row: Any, current: int) -> str:
    """Return a branch in one line: its number, where it left which one, how it ended."""
    mark = "▸" if row.branch == current else " "
    if row.parent is None:
        origin = "the first line of decoding"
    else:
        origin = f"from branch {row.parent} at step {row.fork_step}"
    answer = visible(row.answer).strip()
    said = f" · {answer[:40]}" if answer else ""
    return f"{mark} {row.branch}  {origin} · {row.state}{said}"


def _live(place: Place, kind: type[LivePlace]) -> LivePlace:
    return kind(place.generation, place.branch, place.step)


def _has_branch(reader: TraceReader, there: LivePlace) -> bool:
    try:
        return any(row.branch == there.branch for row in reader.branches(there.generation))
    except FlexInspectError:
        return False
