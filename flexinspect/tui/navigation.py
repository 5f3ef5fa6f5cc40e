"""Navigation in a trace: places, jumps and the way back, following the run, and the replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace
from textual.timer import Timer

from flexinspect.core.errors import FlexInspectError
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.token_window import current_pos
from flexinspect.trace.queries import read_tokens
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.panel_layout import Slots
from flexinspect.tui.trace_session import RunStatus

MAX_PLACES = 100
"""How many jumps can be undone."""

REPLAY_S = 0.3
"""Interval between the steps of a replay."""


class PlacedScreen(Protocol):
    """What navigation reads and changes of the screen of a trace."""

    place: TracePlace
    following: bool
    status: RunStatus

    @property
    def app(self) -> Any: ...
    @property
    def reader(self) -> TraceReader | None: ...
    @property
    def slots(self) -> Slots: ...
    def poll_trace(self) -> None: ...
    def set_interval(self, interval: float, callback: Callable[[], None]) -> Timer: ...
    def set_hidden_place(self, place: TracePlace) -> None: ...
    def show_error(self, error: FlexInspectError) -> None: ...


def clamp_place(place: TracePlace, status: RunStatus) -> TracePlace:
    """Return the nearest place that the trace has: its step, layer and head."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    last = status.last_step
    step = max(place.step, 0) if last is None else min(max(place.step, status.first_step), last)
    return replace(
        place,
        step=step,
        layer=_clamp_index(place.layer, model.get("layers")),
        head=_clamp_index(place.head, model.get("heads")),
    )


def _clamp_index(value: int, count: object) -> int:
    return max(0, min(value, count - 1)) if isinstance(count, int) and count > 0 else max(value, 0)


class Navigation:
    """Changes the place of a screen, and remembers the places from which it has jumped."""

    def __init__(self, screen: PlacedScreen) -> None:
        self._screen = screen
        self._places: list[TracePlace] = []
        self.forked: int | None = None
        """The branch that is followed to its end only."""

    def navigate(self, target: Navigate) -> None:
        """Go to the place that a panel, a dialog or a key requests; stop following."""
        screen = self._screen
        self.go_to_branch(target.generation, target.branch)
        place = screen.place
        if target.step is not None:
            screen.following = False
            place = replace(place, step=target.step, pos=target.pos)
        values = {"layer": target.layer, "head": target.head}
        screen.place = replace(place, **{k: v for k, v in values.items() if v is not None})
        if target.panel is not None:
            screen.slots.focus_panel(target.panel)

    def jump(self, target: Navigate) -> None:
        """Go to a place from which `go_back` returns."""
        before = self._screen.place
        self.navigate(target)
        if self._screen.place != before:
            self._places = [*self._places[1 - MAX_PLACES :], before]

    def go_back(self) -> None:
        """Return to the place before the last jump."""
        screen = self._screen
        if not self._places:
            screen.app.notify("There was no jump yet.")
            return
        place = self._places.pop()
        self.go_to_branch(place.generation, place.branch)
        screen.following, screen.place = False, place

    def move_by(self, n: int) -> None:
        """Go `n` steps forward."""
        self.navigate(Navigate(step=self._screen.place.step + n))

    def move_pos(self, by: int) -> None:
        """Go to the next or the previous token of the text."""
        reader, place = self._screen.reader, self._screen.place
        if reader is None or (pos := current_pos(reader, place)) is None:
            return
        tokens = read_tokens(reader, place.generation, place.branch, pos + by, pos + by + 1)
        for token in tokens:
            step = token.step
            self.navigate(Navigate(step=step or 0, pos=token.pos if step is None else None))

    def go_to_branch(self, generation: int | None, branch: int | None) -> None:
        """Go to the first step of another generation or branch; the current one is ignored."""
        screen, place = self._screen, self._screen.place
        generation = place.generation if generation is None else generation
        branch = place.branch if branch is None else branch
        same = (generation, branch) == (place.generation, place.branch)
        if same or not 0 <= generation < max(screen.status.generations, 1):
            return
        screen.following = False
        # The bounds of the step are those of the old branch until the new one has been polled.
        there = replace(place, generation=generation, branch=branch, pos=None)
        screen.set_hidden_place(there)
        screen.poll_trace()
        screen.set_hidden_place(place)  # else an equal step would not be a change
        screen.place = replace(there, step=screen.status.first_step)

    def follow(self) -> None:
        """Follow the newest step."""
        screen = self._screen
        screen.following, self.forked = True, None
        if screen.status.live and screen.status.generations - 1 > screen.place.generation:
            self.go_to_newest_generation()
        if screen.status.last_step is not None:
            screen.place = replace(screen.place, step=screen.status.last_step, pos=None)

    def go_to_newest_generation(self) -> None:
        """Go to the generation that the run has begun, in the same layer and head."""
        screen, place = self._screen, self._screen.place
        newest = screen.status.generations - 1
        screen.place = TracePlace(newest, layer=place.layer, head=place.head)
        screen.poll_trace()

    def stay_in_fork(self) -> None:
        """Stop following at the end of a fork, so that its answer stays on the screen."""
        screen = self._screen
        screen.following, self.forked = False, None
        follow, compare = map(screen.app.keys_of, ("step.follow", "branch.compare"))
        screen.app.notify(
            f"Branch {screen.place.branch} is finished, and the run continues with the next "
            f"answer. {follow} follows it, {compare} compares this branch with its parent."
        )


class StepReplay:
    """Goes to the next step in an interval, until the last one."""

    def __init__(self, screen: PlacedScreen, navigation: Navigation) -> None:
        self._screen, self._navigation = screen, navigation
        self.timer: Timer | None = None

    def toggle(self) -> None:
        """Show one step after the other until the last one; the second time, stop."""
        if self.timer is not None:
            self.timer.stop()
            self.timer = None
            return
        if self._screen.status.last_step is None:
            self._screen.app.notify("No step is recorded yet.")
            return
        if self._screen.place.step == self._screen.status.last_step:
            self._navigation.navigate(Navigate(step=self._screen.status.first_step))
        self.timer = self._screen.set_interval(REPLAY_S, self._show_next)

    def _show_next(self) -> None:
        if self._screen.place.step == self._screen.status.last_step and self.timer is not None:
            self.toggle()  # which stops
        else:
            self._navigation.move_by(1)
