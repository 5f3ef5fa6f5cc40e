"""The widget of a panel, which loads in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from textual import events
from textual.message import Message

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.low_bandwidth import is_low_bandwidth
from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Canvas, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.panels import base
from flexinspect.panels.base import Navigate, Panel, Picture, Request, TracePlace
from flexinspect.tui.trace_session import TraceSession

PanelLoadRequest = tuple[Panel[Any, Any], Request[Any], int, Theme]
"""A panel, its request, the version of the trace to load it from, and the theme to paint in."""

PlaceLoadRequest = tuple[TracePlace, int]
"""A place, and the version of the trace to load it from."""

ErrorLines = tuple[list[str], str]
"""Lines that explain why nothing is shown, and their style."""

LoadResult = tuple[Any, ErrorLines | None, Picture]
"""The loaded data, or None with the error lines; and the picture of either."""


class LoadedCanvas(Canvas):
    """A canvas whose data a `loader` loads when the place or version of its `TraceScreen` changes.

    While a load runs, only the newest request is kept, so loads never queue up.
    """

    loader: Loader[Any, Any]

    @dataclass
    class NavigationRequest(Message):
        """The widget requests to go to another place."""

        target: Navigate

    @property
    def trace_screen(self) -> Any:
        """The `TraceScreen`, which has the `place` to show and the `version` of the trace."""
        return self.screen

    def on_mount(self) -> None:
        self.watch(self.screen, "place", self.on_change, init=False)
        self.watch(self.screen, "version", self.on_change)

    def on_change(self) -> None:
        """Load the data of the new place or version."""
        self.loader.request_load()

    def on_resize(self, event: events.Resize) -> None:
        self.repaint()

    def place_request(self) -> PlaceLoadRequest:
        """Return the current request of lines that depend on nothing but the place."""
        return self.trace_screen.place, self.trace_screen.version

    def preload(self, place: TracePlace) -> None:
        """Load the data of a place that the user will probably visit next."""
        self.loader.preload((place, self.trace_screen.version))


def cell_of(options: Any) -> tuple[int, int] | None:
    """Return the cell of a mask that a panel's options select: the positions of row and key."""
    q, kv = getattr(options, "q", None), getattr(options, "kv", None)
    return None if q is None or kv is None else (q, kv)


_NO_EFFECT = {
    "view.flip": "there is no other view here",
    "view.measure": "there is no other measure here",
}
"""Actions that are tried before they are offered, and what a key of one says without an effect."""


class PanelView(LoadedCanvas, can_focus=True):
    """A panel on the screen.

    Any exception of a panel is shown in place of the panel and does not end the interface. `note`
    receives the note of a new picture, and whether it is an alarm.
    """

    class EffectsChanged(Message):
        """Other actions of the focused panel have an effect than before."""

    @dataclass
    class CellSelected(Message):
        """The panel's options select another cell of a mask."""

        cell: tuple[int, int]

    def __init__(
        self,
        panel: Panel[Any, Any],
        session: TraceSession,
        pool: Executor,
        note: Callable[[str, bool], None],
    ) -> None:
        super().__init__()
        self.panel = panel
        self._note = note
        self._session = session
        self.options: Any = panel.initial_options
        self.loader = Loader(pool, self._next_request, self._load_panel, self._show_loaded)
        self._request: Request[Any] | None = None
        self._data: Any = None
        self._error: ErrorLines | None = None
        self._effects: tuple[str, ...] | None = None  # not known before it has loaded

    def on_show(self) -> None:
        """Load again: the place may have changed while the view was hidden."""
        self.loader.request_load()

    def on_resize(self, event: events.Resize) -> None:
        """Paint in the new size; load again if the data depend on it."""
        if self.panel.depends_on_size or self._request is None:
            self.loader.request_load()
        else:
            self._request = self._make_request()
            self.repaint()

    def preload(self, place: TracePlace) -> None:
        if not self._is_hidden():
            self.loader.preload(self._load_request(place))

    def _make_request(self, place: TracePlace | None = None) -> Request[Any]:
        width, height = max(self.size.width, 1), max(self.size.height, 1)
        return Request(place or self.trace_screen.place, self.options, width, height)

    def show_panel(self, panel: Panel[Any, Any]) -> None:
        """Replace the panel."""
        self.panel, self.options = panel, panel.initial_options
        self._request = self._data = self._error = self._effects = None
        self.show(())
        self.loader.request_load()

    def _is_hidden(self) -> bool:
        hidden = self.parent is not None and not getattr(self.parent, "display", True)
        return hidden or self.size.area == 0

    def _next_request(self) -> PanelLoadRequest | None:
        return None if self._is_hidden() else self._load_request()

    def _load_request(self, place: TracePlace | None = None) -> PanelLoadRequest:
        version = self.trace_screen.version
        return self.panel, self._make_request(place), version, theme_of(self.app)

    def _load_panel(self, load_request: PanelLoadRequest) -> LoadResult:
        """Load and paint, in a thread: a picture that was made in advance is only shown."""
        panel, request, _, theme = load_request
        data, error = self._load_data(panel, request)
        return data, *_paint(panel, data, error, request, theme)

    def _load_data(
        self, panel: Panel[Any, Any], request: Request[Any]
    ) -> tuple[Any, ErrorLines | None]:
        source = self._session.source
        if source is None or self._session.is_trace_removed:
            return None, (["Nothing is recorded yet."], "muted")
        try:
            base.check_panel_applies(panel, source, request.place)
            return panel.load(source, request), None
        except base.Missing as missing:
            waiting = ["No step is recorded yet."] if self._session.is_waiting else []
            return None, (waiting or missing.lines(), "muted")
        except FlexInspectError as error:
            return None, (error.sentence().splitlines(), "bad")
        except Exception as error:
            return None, (_describe_failure(panel, error), "bad")

    def _show_loaded(self, load_request: PanelLoadRequest, loaded: LoadResult) -> None:
        panel, request, _, theme = load_request
        if panel is not self.panel:
            return  # the panel was replaced meanwhile
        self._request = request
        self._data, self._error, picture = loaded
        if (request.width, request.height) == self.size and theme is theme_of(self.app):
            self._show_picture(picture)
        else:
            self.repaint()
        if self.has_focus:
            effects = tuple(action for action in _NO_EFFECT if self.has_effect(action))
            if effects != self._effects:
                self._effects = effects
                self.post_message(self.EffectsChanged())

    def repaint(self) -> None:
        """Paint the loaded data in the current size and theme."""
        if self._request is None or self.size.area == 0:
            return
        theme = theme_of(self.app)
        painted = _paint(self.panel, self._data, self._error, self._request, theme)
        self._error, picture = painted
        self._show_picture(picture)

    def _show_picture(self, picture: Picture) -> None:
        self.show(picture.strips)
        # Not a message: it would arrive after the frame, and the border would cost another one.
        self._note(picture.note, picture.alarm)

    def handles(self, action: str) -> bool:
        """Return whether the panel handles an action."""
        return action in self.panel.actions

    def has_effect(self, action: str) -> bool:
        """Return whether the panel handles an action and it changes what is shown.

        Until the panel has loaded, and for an action that fails, it counts as one that does.
        """
        if not self.handles(action):
            return False
        if self._request is None:
            return True
        if self._data is None or self._error is not None:
            return False
        if action not in _NO_EFFECT:
            return True  # it depends on the cursor, or takes long to find out
        try:
            result = self.panel.on_action(action, self._data, self._make_request())
        except Exception:
            return True
        return result is not None and result != self.options

    def press(self, action: str) -> None:
        """Pass the action of a key on to the panel; say it if the key changes nothing."""
        if self.has_effect(action):
            self.handle_action(action)
            return
        text = _NO_EFFECT.get(action) if self._error is None else None
        self.notify(f"{self.panel.title}: {text or 'there is nothing to show at this place'}.")

    def handle_action(self, action: str) -> None:
        """Pass an action on to the panel."""
        self._call_panel(self.panel.on_action, action)

    def _call_panel(self, handler: Callable[..., Any], *event: Any, **options: Any) -> None:
        """Call a handler of the panel, and apply the place or the options that it returns."""
        if self._data is None or self._error is not None or self._request is None:
            return
        try:
            result = handler(*event, self._data, self._make_request(), **options)
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error")
        except Exception as error:
            self.notify("\n".join(_describe_failure(self.panel, error)), severity="error")
        else:
            if isinstance(result, Navigate):
                self.post_message(self.NavigationRequest(result))
            elif result is not None:
                self.change_options(result)

    def change_options(self, options: Any) -> None:
        """Show the panel with other options of it."""
        if options != self.options:
            before, self.options = cell_of(self.options), options
            self.loader.request_load()
            cell = cell_of(options)
            if cell is not None and cell != before:
                self.post_message(self.CellSelected(cell))

    def on_click(self, event: events.Click) -> None:
        """Pass a click on to the panel."""
        self._call_panel(self.panel.on_mouse, event.x, event.y, click=True)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Pass the mouse position on to a panel with a cursor."""
        follows = "cursor.left" in self.panel.actions and event.button == 0
        if follows and not is_low_bandwidth():
            self._call_panel(self.panel.on_mouse, event.x, event.y, click=False)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll a list, or zoom out of a picture."""
        self._wheel(event, "zoom.out", "cursor.down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll a list, or zoom into a picture."""
        self._wheel(event, "zoom.in", "cursor.up")

    def _wheel(self, event: events.MouseEvent, *actions: str) -> None:
        for action in actions:
            if self.handles(action):
                event.stop()
                self.handle_action(action)
                return


def _paint(
    panel: Panel[Any, Any],
    data: Any,
    error: ErrorLines | None,
    request: Request[Any],
    theme: Theme,
) -> tuple[ErrorLines | None, Picture]:
    """Paint the data, or the error lines; return them, or those of a paint that failed."""
    if error is None:
        try:
            return None, panel.paint(data, request, theme)
        except Exception as failure:
            error = (_describe_failure(panel, failure), "bad")
    lines, style = error
    strips = [
        strip for text in lines for strip in wrap_paragraph(text, request.width, theme.style(style))
    ]
    return error, Picture(strips[: request.height])


def _describe_failure(panel: Panel[Any, Any], error: Exception) -> list[str]:
    message = escape_unprintable(str(error))
    return [
        f"The panel '{panel.name}' failed: {type(error).__name__}: {message}",
        "The other panels and the trace are not affected; please report it.",
    ]


def theme_of(app: Any) -> Theme:
    """Return the `Theme` of an app: its colours and the colour depth of its terminal; cached."""
    key = (app.theme, app.no_color, app.console.color_system)
    known = getattr(app, "_flexinspect_theme", None)
    if known is None or known[0] != key:
        known = (key, _make_theme(app))
        app._flexinspect_theme = known
    return known[1]


def forget_theme(app: Any) -> None:
    """Read the colours again: Textual sets those of a new theme some moments after its name."""
    app._flexinspect_theme = None


def _make_theme(app: Any) -> Theme:
    from rich.color import Color, ColorParseError

    from flexinspect.drawing.theme import DARK_COLORS

    if app.no_color or app.console.color_system is None:
        return Theme("none")
    colors = dict(DARK_COLORS)
    for name in colors:
        try:
            colors[name] = Color.parse(app.theme_variables.get(name, "")).get_truecolor().hex
        except ColorParseError:
            continue
    return Theme("truecolor" if app.console.color_system == "truecolor" else "256", colors)


W = TypeVar("W")
R = TypeVar("R")


class Loader(Generic[W, R]):
    """Loads the newest request in a thread pool; earlier requests that still wait are dropped.

    `next_request` returns the current request (None: nothing to load), `load` runs in the pool and
    `show` in the interface's thread. What is shown is at most one load old and never waits in a
    queue. A probable next request can be loaded in advance (`preload`).
    """

    def __init__(
        self,
        pool: Executor,
        next_request: Callable[[], W | None],
        load: Callable[[W], R],
        show: Callable[[W, R], None],
    ) -> None:
        self._pool, self._next_request, self._load, self._show = pool, next_request, load, show
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._preloaded: tuple[W, Future[R]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request has not been loaded yet."""
        return not self._idle.is_set()

    def request_load(self) -> None:
        """Load as soon as possible."""
        self._idle.clear()
        self._wake.set()

    def preload(self, request: W) -> None:
        """Load a probable next request; the result is kept until the next request."""
        if not self.is_busy:
            self._cancel_preload()
            self._preloaded = request, self._pool.submit(self._load, request)

    async def wait_idle(self) -> None:
        """Wait until all requests have been loaded and shown."""
        await self._idle.wait()

    async def run(self) -> None:
        """Load whenever it is requested, for ever; the body of a worker."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            request = self._next_request()
            if request is not None:
                if self._preloaded is not None and self._preloaded[0] == request:
                    future = self._preloaded[1]
                else:
                    self._cancel_preload()
                    future = self._pool.submit(self._load, request)
                self._preloaded = None
                loaded = future.result() if future.done() else await asyncio.wrap_future(future)
                self._show(request, loaded)
            if not self._wake.is_set():
                self._idle.set()

    def _cancel_preload(self) -> None:
        if self._preloaded is not None:
            self._preloaded[1].cancel()  # no effect on one that has begun
