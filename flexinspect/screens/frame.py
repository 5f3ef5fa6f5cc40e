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
N_LOOP_ITERATIONS = 5
"""Turns of the event loop until the screen knows of everything that was painted: a widget tells
itself, then the screen, and each reads its mail in a turn of its own. More do no harm."""


class PaintBatch:
    """Holds the painting back until all loaders are at rest, or until that takes too long.

    `after` is called when the frame was painted, if all were at rest by then.
    """

    def __init__(
        self, loaders: Callable[[], Sequence[Loader[Any, Any]]], after: Callable[[], None]
    ) -> None:
        self._loaders, self._after = loaders, after
        self._is_open = False

    def begin(self, screen: Screen[Any]) -> None:
        """Hold the painting back, unless it is held back already."""
        if self._is_open:
            return
        self._is_open = True
        batch = screen.app.batch_update()
        batch.__enter__()
        screen.run_worker(self._finish(screen, batch), group="frame")

    async def _finish(self, screen: Screen[Any], batch: AbstractContextManager[None]) -> None:
        try:
            async with asyncio.timeout(FRAME_S):
                for loader in self._loaders():
                    await loader.wait_idle()
                for _ in range(N_LOOP_ITERATIONS):
                    await asyncio.sleep(0)
        except TimeoutError:
            pass  # what is late is painted when it comes
        else:
            screen.call_after_refresh(self._after)
        finally:
            batch.__exit__(None, None, None)
            self._is_open = False
