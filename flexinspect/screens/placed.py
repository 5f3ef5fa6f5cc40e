"""A widget of a line or two that shows something of the screen's place."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

from textual import events
from textual.reactive import reactive

from flexinspect.feed import Feed
from flexinspect.panels.base import Place
from flexinspect.screens.loader import Loader
from flexinspect.widgets.canvas import Canvas

R = TypeVar("R")
Wish = tuple[Place, int]
"""A place, and the version of the trace that it is to be shown of."""


class PlacedLines(Canvas, Generic[R]):
    """Bound to the screen's `place` and `version`; a subclass loads, takes and draws."""

    place: reactive[Place] = reactive(Place(), repaint=False, init=False)
    version: reactive[int] = reactive(0, repaint=False, init=False)

    def __init__(self, feed: Feed, pool: Executor, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._feed = feed
        self._loader: Loader[Wish, R] = Loader(
            pool, self._wish, lambda wish: self._load(wish[0]), lambda _, found: self._take(found)
        )

    def _load(self, place: Place) -> R:
        """Return what is to be drawn. Runs in a worker thread."""
        raise NotImplementedError

    def _take(self, found: R) -> None:
        """Draw what was loaded."""
        raise NotImplementedError

    @property
    def loader(self) -> Loader[Any, Any]:
        """What loads it; at rest when all that is wanted is on the screen."""
        return self._loader

    def on_mount(self) -> None:
        """Begin to load."""
        self.run_worker(self._loader.run(), exclusive=True)
        self._loader.want()

    def expect(self, place: Place) -> None:
        """Load what this place will need, if it is where the user goes next."""
        self._loader.expect((place, self.version))

    def _wish(self) -> Wish:
        return self.place, self.version

    def watch_place(self) -> None:
        """The screen went elsewhere."""
        self._loader.want()

    def watch_version(self) -> None:
        """The trace grew."""
        self._loader.want()

    def on_resize(self, event: events.Resize) -> None:
        """Draw in the new size."""
        self.repaint()
