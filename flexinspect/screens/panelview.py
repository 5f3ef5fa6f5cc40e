"""The widget that hosts a panel: loads in a thread, paints what came, passes keys and mouse on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed
from flexinspect.panels.base import Go, Missing, Panel, Picture, Place, Request
from flexinspect.panels.parts.trainingrun import check_suits
from flexinspect.screens.loader import Loader
from flexinspect.text import visible
from flexinspect.widgets.canvas import Canvas
from flexinspect.widgets.lines import paragraph
from flexinspect.widgets.look import Look

Wish = tuple[Panel[Any, Any], Request[Any], int]
"""A panel, what it is to show, and the version of the trace that it is to show it of."""

Loaded = tuple[Any, tuple[list[str], str] | None]
"""What a panel loaded; or nothing, with the lines that say why and their style."""


Note = Callable[[str, bool], None]
"""Takes the note of a new picture, and whether it is an alarm."""


class PanelView(Canvas, can_focus=True):
    """One panel on the screen, bound to the screen's `place` and `version`.

    Loads never pile up: while one runs, only the newest wish is kept. Whatever a panel raises is
    shown in its place and ends nothing.
    """

    place: reactive[Place] = reactive(Place(), repaint=False, init=False)
    version: reactive[int] = reactive(0, repaint=False, init=False)

    @dataclass
    class Went(Message):
        """The panel asks to go elsewhere."""

        view: PanelView
        go: Go

    def __init__(self, panel: Panel[Any, Any], feed: Feed, pool: Executor, note: Note) -> None:
        super().__init__()
        self.panel = panel
        self._note = note
        self._feed = feed
        self._options: Any = panel.options()
        self._loader = Loader(pool, self._wish_if_seen, self._load_wish, self._take)
        self._request: Request[Any] | None = None
        self._data: Any = None
        self._trouble: tuple[list[str], str] | None = None

    @property
    def loader(self) -> Loader[Any, Any]:
        """What loads it; at rest when all that is wanted is on the screen."""
        return self._loader

    @property
    def options(self) -> Any:
        """The panel's options as they are now."""
        return self._options

    def on_mount(self) -> None:
        """Begin to load whenever something is wanted."""
        self.run_worker(self._loader.run(), exclusive=True)

    def watch_place(self) -> None:
        """The screen went elsewhere."""
        self.want()

    def watch_version(self) -> None:
        """The trace grew."""
        self.want()

    def want(self) -> None:
        """Load and paint as soon as possible."""
        self._loader.want()

    def on_show(self) -> None:
        """It was hidden: what it shows may be old."""
        self.want()

    def on_resize(self, event: events.Resize) -> None:
        """Paint in the new size; load again where that matters."""
        if self.panel.sized or self._request is None:
            self.want()
        else:
            self._request = self._wish()
            self.repaint()

    def expect(self, place: Place) -> None:
        """Load what this place will need, if it is where the user goes next."""
        if not self._unseen():
            self._loader.expect((self.panel, self._wish(place), self.version))

    def _wish(self, place: Place | None = None) -> Request[Any]:
        size: Size = self.size
        width, height = max(size.width, 1), max(size.height, 1)
        return Request(place or self.place, self._options, width, height)

    def show_panel(self, panel: Panel[Any, Any]) -> None:
        """Show another panel from now on."""
        self.panel, self._options = panel, panel.options()
        self._request = self._data = self._trouble = None
        self.show(())
        self.want()

    def _unseen(self) -> bool:
        hidden = self.parent is not None and not getattr(self.parent, "display", True)
        return hidden or self.size.area == 0

    def _wish_if_seen(self) -> Wish | None:
        return None if self._unseen() else (self.panel, self._wish(), self.version)

    def _load_wish(self, wish: Wish) -> Loaded:
        panel, request, _ = wish
        source = self._feed.source
        if source is None or self._feed.withdrawn:
            return None, (["Nothing is recorded yet."], "muted")
        try:
            check_suits(panel, source, request.place)
            return panel.load(source, request), None
        except Missing as missing:
            waiting = ["No step is recorded yet."] if self._feed.waiting else []
            return None, (waiting or missing.lines(), "muted")
        except FlexInspectError as error:
            return None, (error.sentence().splitlines(), "bad")
        except Exception as error:
            return None, (_fault(panel, error), "bad")

    def _take(self, wish: Wish, loaded: Loaded) -> None:
        panel, request, _ = wish
        if panel is not self.panel:
            return  # it was exchanged meanwhile
        self._request = request
        self._data, self._trouble = loaded
        self.repaint()

    def repaint(self) -> None:
        """Paint what is loaded, in the size and the colours of now."""
        if self._request is None or self.size.area == 0:
            return
        picture = self._picture(self._request)
        self.show(picture.strips)
        # Not a message: it would come after the frame, and the border cost a second one.
        self._note(picture.note, picture.alarm)

    def _picture(self, request: Request[Any]) -> Picture:
        look = look_of(self.app)
        if self._trouble is None:
            try:
                return self.panel.paint(self._data, request, look)
            except Exception as error:
                self._trouble = (_fault(self.panel, error), "bad")
        lines, style = self._trouble
        strips = [
            strip for text in lines for strip in paragraph(text, request.width, look.style(style))
        ]
        return Picture(strips[: request.height])

    def answers(self, action: str) -> bool:
        """Tell whether the panel has an answer to an action."""
        return action in self.panel.actions

    def act(self, action: str) -> None:
        """Pass an action of the keyboard on."""
        if self._data is not None and self._trouble is None and self._request is not None:
            self._follow(self._guarded(self.panel.act, action, self._data, self._wish()))

    def _guarded(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error", markup=False)
        except Exception as error:
            self.notify("\n".join(_fault(self.panel, error)), severity="error", markup=False)
        return None

    def _follow(self, answer: Any) -> None:
        if isinstance(answer, Go):
            self.post_message(self.Went(self, answer))
        elif answer is not None and answer != self._options:
            self._options = answer
            self.want()

    def on_click(self, event: events.Click) -> None:
        """Pass a click on."""
        self._point(event.x, event.y, click=True)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Pass the mouse on, to panels that have a cursor."""
        if "cursor.left" in self.panel.actions and event.button == 0:
            self._point(event.x, event.y, click=False)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll a list, or zoom out of a picture."""
        self._wheel(event, "zoom.out", "cursor.down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll a list, or zoom into a picture."""
        self._wheel(event, "zoom.in", "cursor.up")

    def _wheel(self, event: events.MouseEvent, *actions: str) -> None:
        for action in actions:
            if self.answers(action):
                event.stop()
                self.act(action)
                return

    def _point(self, x: int, y: int, *, click: bool) -> None:
        if self._data is None or self._trouble is not None or self._request is None:
            return
        point = self.panel.point
        self._follow(self._guarded(point, x, y, self._data, self._wish(), click=click))


def _fault(panel: Panel[Any, Any], error: Exception) -> list[str]:
    return [
        f"The panel '{panel.name}' failed: {type(error).__name__}: {visible(str(error))}",
        "The other panels and the trace are not concerned; please report it.",
    ]


def look_of(app: Any) -> Look:
    """Return the look of an app: its theme's colours, its terminal's depth; one object a theme."""
    key = (app.theme, app.no_color, app.console.color_system)
    known = getattr(app, "_flexinspect_look", None)
    if known is None or known[0] != key:
        known = (key, _make_look(app))
        app._flexinspect_look = known
    return known[1]


def _make_look(app: Any) -> Look:
    from rich.color import Color, ColorParseError

    from flexinspect.widgets.look import DARK

    if app.no_color or app.console.color_system is None:
        return Look("none")
    colors = dict(DARK)
    for name in colors:
        try:
            colors[name] = Color.parse(app.theme_variables.get(name, "")).get_truecolor().hex
        except ColorParseError:
            continue
    if not app.current_theme.dark:
        colors["muted"] = "#666a73"
    return Look("truecolor" if app.console.color_system == "truecolor" else "256", colors)
