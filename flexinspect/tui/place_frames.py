"""A new place is shown in one frame, and the place that follows is loaded ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace
from textual.screen import Screen

from flexinspect.panels.base import TracePlace
from flexinspect.tui.navigation import clamp_place
from flexinspect.tui.panel_view import LoadedCanvas, PanelView
from flexinspect.tui.trace_session import RunStatus

FRAME_S = 0.03
"""How long a frame waits for slow panels.

Textual paints 60 times per second at fixed times; a frame painted in two parts takes two of them.
"""
N_LOOP_ITERATIONS = 5
"""Iterations of the event loop until the screen knows of everything painted.

A widget posts a message to itself, then to the screen, and each message is handled in its own
iteration. More iterations do no harm.
"""


def extrapolate_place(old: TracePlace, new: TracePlace) -> TracePlace | None:
    """Return the place after `new` if the user keeps moving as from `old`; None if unknown."""
    if (old.generation, old.branch) != (new.generation, new.branch):
        return None
    return replace(
        new,
        step=2 * new.step - old.step,
        layer=2 * new.layer - old.layer,
        head=2 * new.head - old.head,
    )


def next_place(old: TracePlace, new: TracePlace, status: RunStatus) -> TracePlace | None:
    """Return the place that the same key would go to next, None for none and in a live trace."""
    place = None if status.live else extrapolate_place(old, new)
    place = None if place is None else clamp_place(place, status)
    return None if place == new else place


class PlaceFrames:
    """Holds the paints of a screen back until its `canvases` have loaded their new place."""

    def __init__(self, screen: Screen[Any], canvases: Callable[[], Iterable[LoadedCanvas]]) -> None:
        self._screen, self._canvases = screen, canvases
        self._is_open = False
        self._next_place: TracePlace | None = None
        self._finishing: asyncio.Task[None] | None = None  # the loop keeps no reference to a task

    def show(self, ahead: TracePlace | None = None, *, within_s: float = FRAME_S) -> None:
        """Show a new place in one frame, within `within_s` seconds even if panels are slow.

        `ahead` is loaded in advance if there is time.
        """
        self._next_place = ahead
        if self._screen.is_mounted and not self._is_open:
            self._is_open = True
            batch = self._screen.app.batch_update()
            batch.__enter__()
            # Not a worker, whose messages take as long as drawing a panel.
            self._finishing = asyncio.create_task(self._finish(batch, within_s))

    async def _finish(self, batch: AbstractContextManager[None], within_s: float) -> None:
        """Paint when all is loaded, or after `within_s`."""
        try:
            canvases = [*self._canvases()]  # the screen may be closed meanwhile
            async with asyncio.timeout(within_s):
                for canvas in canvases:
                    await canvas.loader.wait_idle()
                for _ in range(N_LOOP_ITERATIONS):
                    await asyncio.sleep(0)
        except TimeoutError:  # late results are painted when they arrive
            for canvas in canvases:
                if canvas.loader.is_busy and not isinstance(canvas, PanelView):
                    canvas.repaint()  # the header shows the new step without them
        else:
            self._screen.call_after_refresh(self.load_next)
        finally:
            batch.__exit__(None, None, None)
            self._is_open = False

    def load_next(self) -> None:
        """Load in advance the place that the same key would go to next."""
        if self._next_place is not None:
            for canvas in self._canvases():
                canvas.preload(self._next_place)
