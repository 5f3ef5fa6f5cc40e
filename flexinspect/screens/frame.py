"""Painting a new place in one frame, not panel by panel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from textual.screen import Screen

from flexinspect.screens.loader import Loader

FRAME_S = 0.03
"""How long a frame waits for slow panels. Textual paints 60 times a second, on a grid; a frame that
is painted in two parts takes two places on it."""


class Frame:
    """Holds the painting back until all loaders are at rest, or until that takes too long."""

    def __init__(self, loaders: Callable[[], Sequence[Loader[Any, Any]]]) -> None:
        self._loaders = loaders
        self._open = False

    def begin(self, screen: Screen[Any]) -> None:
        """Hold the painting back, unless it is held back already."""
        if self._open:
            return
        self._open = True
        batch = screen.app.batch_update()
        batch.__enter__()
        screen.run_worker(self._finish(batch), group="frame")

    async def _finish(self, batch: AbstractContextManager[None]) -> None:
        try:
            async with asyncio.timeout(FRAME_S):
                for loader in self._loaders():
                    await loader.rest()
        except TimeoutError:
            pass  # what is late is painted when it comes
        finally:
            batch.__exit__(None, None, None)
            self._open = False
