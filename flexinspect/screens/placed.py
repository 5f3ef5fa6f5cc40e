"""A widget of a line or two that shows something of the screen's place."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

from textual import events
from textual.reactive import reactive

from flexinspect.feed import TraceSession
from flexinspect.panels.base import TracePlace
from flexinspect.screens.loader import Loader
from flexinspect.widgets.canvas import Canvas

R = TypeVar("R")
PlaceLoadRequest = tuple[TracePlace, int]
"""A place, and the version of the trace that it is to be shown of."""


class LoadedLines(Canvas, Generic[R]):
    """Bound to the screen's `place` and `version`; a subclass loads, takes and draws."""

    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False, init=False)
    version: reactive[int] = reactive(0, repaint=False, init=False)

    def __init__(self, session: TraceSession, pool: Executor, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._session = session
        self._loader: Loader[PlaceLoadRequest, R] = Loader(
            pool,
            self._next_request,
            lambda wish: self._load(wish[0]),
            lambda _, found: self._show_loaded(found),
        )

    def _load(self, place: TracePlace) -> R:
        """Return what is to be drawn. Runs in a worker thread."""
        raise NotImplementedError

    def _show_loaded(self, found: R) -> None:
        """Draw what was loaded."""
        raise NotImplementedError

    @property
    def loader(self) -> Loader[Any, Any]:
        """What loads it; at rest when all that is wanted is on the screen."""
        return self._loader

    def on_mount(self) -> None:
        """Begin to load."""
        self.run_worker(self._loader.run(), exclusive=True)
        self._loader.request_load()

    def preload(self, place: TracePlace) -> None:
        """Load what this place will need, if it is where the user goes next."""
        self._loader.preload((place, self.version))

    def _next_request(self) -> PlaceLoadRequest:
        return self.place, self.version

    def watch_place(self) -> None:
        """The screen went elsewhere."""
        self._loader.request_load()

    def watch_version(self) -> None:
        """The trace grew."""
        self._loader.request_load()

    def on_resize(self, event: events.Resize) -> None:
        """Draw in the new size."""
        self.repaint()
