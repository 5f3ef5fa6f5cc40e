"""Driving the interface in a test: wait until all is loaded, read the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from flexinspect.tui.panel_view import LoadedCanvas


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until every panel has loaded and painted what is wanted, and every search has ended."""
    for _ in range(400):
        await pilot.pause()
        screen = pilot.app.screen
        loading = screen.query(LoadedCanvas).results(LoadedCanvas)
        is_searching = any(worker.group == "search" for worker in screen.workers)
        if not is_searching and not any(view.loader.is_busy for view in loading):
            await pilot.pause()
            return
        await pilot.pause(0.01)
    raise AssertionError("the interface never came to rest")


async def until(pilot: Pilot[Any], is_so: Callable[[], object]) -> None:
    """Wait until something is so on the screen, for instance after a change of its layout."""
    for _ in range(400):
        if is_so():
            return
        await pilot.pause(0.01)
    raise AssertionError(screen_text(pilot.app))


def screen_lines(app: Any) -> list[str]:
    """Return the text on the screen, line by line."""
    return ["".join(s.text for s in row) for row in app.screen._compositor.render_strips()]


def screen_text(app: Any) -> str:
    """Return the text on the screen."""
    return "\n".join(screen_lines(app))
