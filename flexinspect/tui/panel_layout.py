"""Layout of the panels: how many are shown, in how many columns, and which one is maximized."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from flexinspect.core.environment import import_numpy
from flexinspect.core.errors import FlexInspectError, TraceError
from flexinspect.core.keyboard import N_DIGITS, all_keys
from flexinspect.drawing.text_lines import clip_text
from flexinspect.panels.base import Panel, Picture
from flexinspect.panels.panel_registry import load_panel, panel_names, panel_number
from flexinspect.panels.panel_source import Source
from flexinspect.tui import saved_state
from flexinspect.tui.panel_view import LoadedCanvas, PanelView
from flexinspect.tui.saved_state import MAX_SLOTS, Layout
from flexinspect.tui.screens.dialogs import ask_choice
from flexinspect.tui.trace_session import TraceSession

FIRST_PANELS_WITHIN_S = 0.2
"""How long the first panels wait for each other, to be drawn in one frame."""
LOAD_WITHIN_S = 1.0
"""When loading starts on a terminal that is too small for any frame."""
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "understand": ("mask", "logits", "tokens", "attention"),
    "token": ("logits", "attention", "tokens", "path"),
    "health": ("layers", "path", "memory", "run"),
    "training": ("training", "gradstrip", "findings", "memory"),
    "compare": ("branches", "mask", "logits", "tokens"),
}
"""The panels of each layout that a key selects, the main one first."""

_KIND_FACTS = {"training": "watch_training", "program": "program"}
"""By kind of trace, the fact of the manifest that only this kind has."""

OPTION_WIDTH = 60
"""Cells of a line of the list of panels, which then shows all of them in 24 lines."""

MIN_MAIN_WIDTH = 100
"""Width from which the first panel has two thirds of the columns, and the others the rest."""


def trace_kind(source: Source) -> str:
    """Return the kind of a trace, by which layouts are saved: training, program or generation."""
    try:
        run = source.reader.run()
    except TraceError:
        run = {}
    return next((kind for kind, fact in _KIND_FACTS.items() if run.get(fact)), "generation")


def exhibit_panel(source: Source | None) -> str:
    """Return the panel that answers the question of an exhibit; "" for any other trace."""
    try:
        exhibit = source.reader.run().get("exhibit") if source is not None else None
    except TraceError:
        return ""
    if not isinstance(exhibit, dict):
        return ""
    from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS  # only exhibits need it

    return next((run.panel for run in BROKEN_RUNS if run.name == exhibit.get("name")), "")


def n_slots(width: int, height: int) -> int:
    """Return how many panels (1 to 4) a terminal of this size, in cells, can show well."""
    if width < 60:
        return 2 if height >= 24 else 1
    if width < MIN_MAIN_WIDTH:
        return 2 if height < 44 else 4
    return 2 if height < 28 else 3 if height < 44 else 4


def n_columns(slots: int, width: int) -> int:
    """Return the number of columns for this number of panels and width in cells."""
    return 1 if slots == 1 or width < 60 else 2


def loadable_panels(names: tuple[str, ...]) -> list[str]:
    """Return the first `MAX_SLOTS` panels that load, of `names` and then of all panels."""
    loadable = [name for name in dict.fromkeys(names) if _is_loadable(name)]
    if len(loadable) < MAX_SLOTS:  # else other packages need not be searched for panels
        loadable += [name for name in panel_names() if name not in names and _is_loadable(name)]
    return loadable[:MAX_SLOTS]


def format_panel_option(name: str) -> str:
    """Return the line of a panel in the list of panels: its number, title and what it shows."""
    try:
        panel = load_panel(name)
    except FlexInspectError as error:
        return f"{name}: {error.message}"
    shows = panel.help.shows.removeprefix("It shows ")
    return clip_text(f"{panel_number(name):>2} {panel.title:<14} {shows}", OPTION_WIDTH)


def _is_loadable(name: str) -> bool:
    try:
        load_panel(name)
    except FlexInspectError:
        return False
    return True


def start_gc() -> None:
    """Start garbage collection, without the objects loaded so far.

    Modules and styles stay anyway, and a full collection takes 20 to 60 ms here, several frames.
    What is garbage already stays too: a few thousand small objects.
    """
    gc.freeze()
    gc.enable()


class _NoPanel(Panel[None, None]):
    """Stands in a frame until its panel is loaded."""

    name = title = ""

    def load(self, *args: object) -> None:
        return None

    def paint(self, *args: object) -> Picture:
        return Picture([])


class Frame(Container):
    """A container that is not drawn again while nothing of itself changes.

    The compositor asks for the lines of every widget at every frame, and Textual puts those of a
    container together from its cache, with its styles, line by line.
    """

    _lines: tuple[Region, list[Strip]] | None = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines of a region of the frame: borders, and the background."""
        cache = self._styles_cache
        is_changed = bool(cache._dirty_lines) or not cache._cache
        if is_changed or self._lines is None or self._lines[0] != crop:
            self._lines = crop, super().render_lines(crop)
        return self._lines[1]


class Slot(Frame):
    """A frame with a panel: the title of the panel in the upper border, its note in the lower."""

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(classes="slot")
        self.view = PanelView(_NoPanel(), session, pool, self._show_note)
        self._shown_note = ("", False)

    def compose(self) -> ComposeResult:
        yield self.view

    def replace(self, name: str) -> None:
        """Show a panel in this frame. Raises `FlexInspectError` if it does not load."""
        panel = load_panel(name)
        self.view.show_panel(panel)
        number = panel_number(name)  # of its digit key
        self.border_title = Content(
            f"{number} {panel.title}" if number <= N_DIGITS else panel.title
        )
        self._show_note("", False)

    def _show_note(self, note: str, alarm: bool) -> None:
        """Write the panel's note in the lower border, if it has changed."""
        if (note, alarm) != self._shown_note:
            if alarm != self._shown_note[1]:
                self.set_class(alarm, "alarm")
            self._shown_note = (note, alarm)
            # Setting Textual's `border_subtitle` draws all lines of the frame again, not only one.
            self._border_subtitle = Content(note.partition("\n")[0])
            self.refresh(Region(-1, self.size.height, self.outer_size.width, 1))


class Slots(Frame):
    """All frames: keeps which panel is where and how many are shown, and saves it.

    With `has_tour`, and for an exhibit of the museum, they begin with the panels of a new user, and
    nothing is saved. The first panel of an exhibit is the one that answers its question.
    """

    class Changed(Message):
        """A frame shows another panel."""

    def __init__(self, session: TraceSession, pool: Executor, *, has_tour: bool = False) -> None:
        super().__init__(id="slots")
        self._session = session
        self._exhibit_panel = "" if has_tour else exhibit_panel(session.source)
        self._is_saved = not (has_tour or self._exhibit_panel)
        self._slots = [Slot(session, pool) for _ in range(MAX_SLOTS)]
        self._layouts = dict(saved_state.load_state().layouts) if self._is_saved else {}
        self._kind = "generation"
        self._n_requested = self._layout().slots
        self._maximized: int | None = None
        self.loaded = asyncio.Event()
        """Set when the panels are loaded: after the first frame, or before a key acts."""

    def compose(self) -> ComposeResult:
        """Yield `MAX_SLOTS` frames; `lay_out` shows those that fit."""
        yield from self._slots

    def on_mount(self) -> None:
        self.watch(self.screen, "version", self._on_new_version)
        self.set_timer(LOAD_WITHIN_S, self.ensure_loaded)

    def ensure_loaded(self) -> None:
        """Load what the first frame does not show: after it is painted, or before a key acts."""
        if not self.loaded.is_set():
            self._load_panels()
            self.run_worker(self._start_loaders())
            self.call_after_refresh(start_gc)

    async def _start_loaders(self) -> None:
        """Load the lines above the panels, which decide their size, then all panels."""
        canvases = [*self.screen.query(LoadedCanvas)]
        lines = [canvas for canvas in canvases if not isinstance(canvas, PanelView)]
        for canvas in lines:
            canvas.run_worker(canvas.loader.run(), exclusive=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PANELS_WITHIN_S):
                for canvas in lines:
                    await canvas.loader.wait_idle()
        self.call_after_refresh(self._start_panels)

    def _start_panels(self) -> None:
        for view in self.screen.query(PanelView):
            view.run_worker(view.loader.run(), exclusive=True)
        screen: Any = self.screen
        screen.frames.show(within_s=FIRST_PANELS_WITHIN_S)

    def _load_panels(self) -> None:
        """Show the panels of this kind of trace in the frames."""
        import_numpy()
        self._show_panels(self._layout().panels)

    def _layout(self) -> Layout:
        """Return the saved layout of this kind of trace, or its first one."""
        first = (self._exhibit_panel,) if self._exhibit_panel else ()
        panels = tuple(dict.fromkeys((*first, *LAYOUTS[self._first_layout()])))
        return self._layouts.get(self._kind) or Layout(panels)

    def _first_layout(self) -> str:
        return "training" if self._kind == "training" else "understand"

    def _show_panels(self, panels: tuple[str, ...]) -> None:
        names = loadable_panels(panels)
        self.loaded.set()
        if not names:
            text = "No panel could be loaded: the installation is incomplete. Install it again."
            self.notify(text, severity="error", timeout=60)
        for slot, name in zip(self._slots, names, strict=False):
            slot.replace(name)
        self.lay_out()
        self.post_message(self.Changed())

    def _on_new_version(self) -> None:
        """Show the layout of the kind of trace, which is not known before its run has begun."""
        source = self._session.source
        kind = self._kind if source is None else trace_kind(source)
        if kind == self._kind:
            return
        self._kind = kind
        self._n_requested = self._layout().slots
        for strip in self.screen.query("#strip"):
            strip.display = kind != "training"  # which has no tokens
        if self.loaded.is_set():
            self._load_panels()

    def views(self) -> list[PanelView]:
        """Return the views that are shown, in order."""
        return [slot.view for slot in self._slots if slot.display]

    def current(self) -> PanelView:
        """Return the focused view, or the first one."""
        shown, focused = self.views(), self.screen.focused
        return next((view for view in shown if view is focused), shown[0])

    def _current_index(self) -> int:
        return [slot.view for slot in self._slots].index(self.current())

    def handle_action(self, action: str) -> None:
        """Show a panel or a layout, or pass the action to the first panel that handles it."""
        if action.startswith("panel.show-"):
            number = int(action.rpartition("-")[2])
            if number <= len(panel_names()):
                self.show_panel(panel_names()[number - 1])
            return
        if action.startswith("layout."):
            self.apply_layout(action.partition(".")[2])
            return
        for view in (self.current(), *self.views()):
            if view.handles(action):
                view.press(action)
                return
        if self.current().panel.name:  # else a message has said that no panel could be loaded
            text = next((key.text for key in all_keys() if key.id == action), action)
            self.notify(f"No panel on the screen answers this key ({text}).")

    def cycle_focus(self, by: int) -> None:
        """Focus the next (1) or the previous (-1) panel."""
        shown = self.views()
        shown[(shown.index(self.current()) + by) % len(shown)].focus()

    def show_panel(self, name: str) -> None:
        """Show a panel in the focused frame; a frame that had it gets the panel from there."""
        slot = self._slots[self._current_index()]
        other = next((s for s in self._slots if s.view.panel.name == name), None)
        if other is slot:
            return
        before = slot.view.panel.name
        try:
            slot.replace(name)
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error", timeout=15)
            return
        if other is not None:
            other.replace(before)
        self._save_layout()
        self.post_message(self.Changed())

    async def choose_panel(self) -> None:
        """Choose the panel of the focused frame from a list."""
        options = [(name, format_panel_option(name)) for name in panel_names()]
        answer = await ask_choice(self.app, "Show here", options)
        if answer:
            self.show_panel(answer)

    def focus_panel(self, name: str) -> None:
        """Focus a panel; if it is not shown, show it in the focused frame."""
        view = next((view for view in self.views() if view.panel.name == name), None)
        if view is None:
            self.show_panel(name)
        else:
            view.focus()

    def bring_panel(self, name: str) -> None:
        """Show a panel beside the focused one, if it is not shown; "" for none. It is not saved."""
        if not name or any(view.panel.name == name for view in self.views()):
            return
        if self._maximized is not None:
            self.toggle_maximized()
            self.bring_panel(name)
            return
        current = self._current_index()
        slot = self._slots[int(current == 0 and len(self.views()) > 1)]
        hidden = next((s for s in self._slots if s.view.panel.name == name), None)
        if hidden is not None:
            hidden.replace(slot.view.panel.name)
        slot.replace(name)
        self.post_message(self.Changed())

    def _save_layout(self) -> None:
        if self.loaded.is_set() and self._is_saved:
            names = tuple(slot.view.panel.name for slot in self._slots)
            self._layouts[self._kind] = layout = Layout(names, self._n_requested)
            saved_state.save_layout(self._kind, layout)

    def toggle_maximized(self) -> None:
        """Show only the focused panel, or all panels again.

        This is not saved: another trace would open with one panel, perhaps an empty one.
        """
        self._maximized = self._current_index() if self._maximized is None else None
        self.lay_out()

    def reset(self) -> None:
        """Show the panels that a new user sees for this kind of trace, as many as fit."""
        self.apply_layout(self._first_layout())

    def apply_layout(self, name: str) -> None:
        """Show the panels of a layout, as many as fit."""
        self._maximized, self._n_requested = None, 0
        self._show_panels(LAYOUTS[name])
        self._save_layout()

    def change_count(self, by: int) -> None:
        """Show `by` more (or fewer) panels."""
        self._n_requested = min(max(len(self.views()) + by, 1), MAX_SLOTS)
        self._maximized = None
        self._save_layout()
        self.lay_out()

    def on_resize(self, event: events.Resize) -> None:
        self.lay_out()
        if not self.loaded.is_set():
            self.call_after_refresh(self.ensure_loaded)

    def lay_out(self) -> None:
        """Show as many frames as were requested or as fit, in columns."""
        width, height = self.size.width or self.app.size.width, self.app.size.height
        n_wanted = self._n_requested or n_slots(width, height)
        for index, slot in enumerate(self._slots):
            slot.display = index < n_wanted if self._maximized is None else index == self._maximized
        n_shown = n_wanted if self._maximized is None else 1
        columns = n_columns(n_shown, width)
        has_main = columns > 1 and width >= MIN_MAIN_WIDTH
        n_rows = n_shown - 1 if has_main else -(-n_shown // columns)
        self.styles.grid_size_columns, self.styles.grid_size_rows = columns, n_rows
        self.styles.grid_columns = "2fr 1fr" if has_main else "1fr"
        self._slots[0].styles.row_span = n_rows if has_main else 1
        if not isinstance(self.screen.focused, LoadedCanvas):
            self.current().focus()
