"""Driving the interface in a test: press keys, wait until all is loaded, read the screen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from flexinspect.panels.base import TracePlace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import LoadedCanvas
from flexinspect.tui.screens.dialogs import TextDialog
from flexinspect.tui.screens.trace_screen import TraceScreen
from support.patience import PATIENCE_S


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until every panel has loaded and painted what is wanted, and every search has ended."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        await pilot.pause()
        screen = pilot.app.screen
        loading = screen.query(LoadedCanvas).results(LoadedCanvas)
        is_searching = hasattr(screen, "search") and screen.search._n_searches > 0
        if not is_searching and not any(view.loader.is_busy for view in loading):
            await pilot.pause()
            return
        await pilot.pause(0.01)
    raise AssertionError("the interface never came to rest")


async def until(pilot: Pilot[Any], is_so: Callable[[], object]) -> None:
    """Wait until something is so on the screen, for instance after a change of its layout."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
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


async def press(pilot: Any, *keys: str) -> None:
    """Press keys, and wait until all is loaded."""
    for key in keys:
        await pilot.press(key)
    await settle(pilot)


async def answer(pilot: Any, key: str, text: str) -> None:
    """Press a key that opens a prompt, and type the text."""
    await settle(pilot)
    await pilot.press(key)
    await pilot.pause()
    assert isinstance(pilot.app.screen, TextDialog)
    await pilot.press(*text, "enter")
    await settle(pilot)


def place(app: InspectorApp) -> TracePlace:
    """Return the place that the screen of the trace shows."""
    assert isinstance(app.screen, TraceScreen)
    return app.screen.place
