"""A rail at the left of the panels: answers, branches, running captures and recent traces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.cells import cell_len
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Pen, clip_text
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.tui import rail_data, saved_state
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PanelView, theme_of
from flexinspect.tui.rail_data import OtherTraces, RailData, RailRequest, Row, row_of_place
from flexinspect.tui.trace_session import TraceSession
from flexinspect.tui.trace_verdict import TraceVerdict, read_verdict

MIN_WIDTH_BESIDE = 100
"""Width of the screen from which the rail stands beside the panels; below, it covers them."""
MIN_WIDTH_AT_FIRST = 160
"""Width of the screen from which a new user sees the rail."""
LIST_EVERY_S = 2.0
"""Interval between looks for running captures."""
PAGE, WHEEL = 10, 3
FAR = 1 << 40
_VERDICT_STYLES = {
    "error": "bad",
    "warning": "warn",
    "success": "good",
    "accent": "accent",
}


class RailList(LoadedCanvas, can_focus=True):
    """The rows of the rail. Only those that are visible are loaded.

    The cursor is on the row of the place until a key or the wheel moves it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", f"move({-PAGE})", show=False),
        Binding("pagedown", f"move({PAGE})", show=False),
        Binding("home", f"move({-FAR})", show=False),
        Binding("end", f"move({FAR})", show=False),
        Binding("enter", "choose", show=False),
        Binding("escape", "leave", show=False),
    ]

    @dataclass
    class TraceRequest(Message):
        """The user asks to open another trace."""

        path: Path

    class Left(Message):
        """The user returns to the panels."""

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__()
        self._session = session
        self.loader = Loader(pool, self._next_request, self._load, self._show_loaded)
        self._data: RailData | None = None
        self._others = OtherTraces()
        self._verdicts: dict[Path, TraceVerdict] = {}
        self._cursor: Row | None = None

    # -- loading ---------------------------------------------------------------------------------

    @property
    def is_shown(self) -> bool:
        """Whether the rail is displayed."""
        return self.parent is not None and bool(getattr(self.parent, "display", False))

    @work(exclusive=True, group="rail")
    async def list_other_traces(self) -> None:
        """List running captures and recent traces, then read the verdicts, while it is shown."""
        process = self._session.process
        own_pid = process.pid if process is not None else None
        while self.is_mounted:
            path = self._session.path
            others = await asyncio.to_thread(rail_data.list_other_traces, path, own_pid)
            if others != self._others:
                self._others = others
                self.loader.request_load()
            for path in others.traces:
                if path not in self._verdicts:
                    self._verdicts[path] = await asyncio.to_thread(read_verdict, path)
                    self.repaint()
            await asyncio.sleep(LIST_EVERY_S)
            if not self.is_shown:
                return

    def on_change(self) -> None:
        """Load for the new place or version; without the focus, the cursor follows the place."""
        if self.is_shown:
            if not self.has_focus:
                self._cursor = None
            self.loader.request_load()

    def on_show(self) -> None:
        """Load again: the place may have changed while the rail was hidden."""
        self.loader.request_load()

    def on_resize(self, event: events.Resize) -> None:
        self.loader.request_load()

    def preload(self, place: TracePlace) -> None:
        """Load nothing in advance: neighbouring places have the same rows."""

    def _next_request(self) -> RailRequest | None:
        if not self.is_shown or not self.size.area:
            return None
        place, version = self.place_request()
        top = self._data.top if self._data is not None else 0
        cursor = self._cursor or row_of_place(place)
        return RailRequest(place, version, self._others, cursor, top, self.size.height)

    def _load(self, request: RailRequest) -> RailData:
        path = self._session.path
        name = escape_unprintable(path.stem) if path is not None else "This run"
        try:
            return rail_data.load_rail(self._session.source, name, request)
        except FlexInspectError:
            return rail_data.load_rail(None, name, request)  # the panels show the reason

    def _show_loaded(self, request: RailRequest, loaded: RailData) -> None:
        self._data = loaded
        self.repaint()

    def repaint(self) -> None:
        """Draw the loaded rows."""
        if self._data is None or not self.size.area:
            self.show([])
            return
        pen, here = Pen(theme_of(self.app), self.size.width), row_of_place(self.trace_screen.place)
        cursor = (self._cursor or here) if self.has_focus else None
        self.show(
            [
                draw_row(row, self._data, self._verdicts, pen, here, cursor)
                for row in self._data.rows
            ]
        )

    # -- keys and mouse --------------------------------------------------------------------------

    def on_focus(self) -> None:
        if self.parent is not None:
            self.parent.border_subtitle = "⏎ go there · esc back"  # type: ignore[attr-defined]
        self.repaint()

    def on_blur(self) -> None:
        if self.parent is not None:
            self.parent.border_subtitle = ""  # type: ignore[attr-defined]
        self._cursor = None
        self.loader.request_load()

    def action_move(self, by: int) -> None:
        """Move the cursor by a number of rows, without stopping at headings."""
        if self._data is not None and len(self._data.outline):
            outline = self._data.outline
            cursor = self._cursor or row_of_place(self.trace_screen.place)
            self._cursor = outline.row(outline.move(outline.index(cursor) or 0, by))
            self.loader.request_load()

    def action_choose(self) -> None:
        """Go to the answer or branch, or open the trace, at the cursor."""
        self._choose(self._cursor or row_of_place(self.trace_screen.place))

    def action_leave(self) -> None:
        """Return to the panels."""
        self.post_message(self.Left())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-WHEEL)

    def on_click(self, event: events.Click) -> None:
        """Go to what was clicked."""
        if self._data is not None and event.y < len(self._data.rows):
            self._choose(self._data.rows[event.y])

    def _choose(self, row: Row) -> None:
        generation = self.trace_screen.place.generation
        if row.kind == "answer":
            self.post_message(self.NavigationRequest(Navigate(generation=row.key, branch=0)))
        elif row.kind == "branch" and self._data is not None and row.key in self._data.branches:
            step = self._data.branches[row.key].fork_step
            target = Navigate(generation=generation, branch=row.key, step=step)
            self.post_message(self.NavigationRequest(target))
        elif row.kind in ("capture", "trace"):
            self.post_message(self.TraceRequest(row.key))
        if row.kind != "heading":
            self._cursor = row


class SideRail(Container):
    """The frame of the rail; hidden, it reads nothing."""

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="rail", classes="slot")
        self.rows = RailList(session, pool)
        self.border_title = "Contents"
        self.display = False
        self._is_wanted = saved_state.load_state().rail
        self._is_overlay = False
        self._focused_before: Widget | None = None

    def compose(self) -> ComposeResult:
        yield self.rows

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self._on_focus_change, init=False)

    def fit_screen(self, width: int) -> None:
        """Stand beside the panels of a wide screen; cover them only while it has the focus."""
        self._is_overlay = width < MIN_WIDTH_BESIDE
        self.set_class(self._is_overlay, "overlay")
        is_wanted = width >= MIN_WIDTH_AT_FIRST if self._is_wanted is None else self._is_wanted
        self._show(self.rows.has_focus or (is_wanted and not self._is_overlay))

    def _on_focus_change(self, focused: Widget | None) -> None:
        """Uncover the panels when one of them gets the focus."""
        if self._is_overlay and isinstance(focused, PanelView):
            self._show(False)

    def toggle(self) -> None:
        """Show and focus the rail, focus it where it is shown, or hide it."""
        is_shown = not self.rows.has_focus
        self._show(is_shown)
        if is_shown:
            self._focused_before = self.screen.focused
            self.rows.focus()
        else:
            self._focus_panels()
        if not self._is_overlay:
            self._is_wanted = is_shown
            saved_state.save_state(rail=is_shown)

    @on(LoadedCanvas.NavigationRequest)
    def _leave_overlay(self) -> None:
        """Show the new place in panels that the rail covers."""
        if self._is_overlay:
            self._focus_panels()

    @on(RailList.Left)
    def _focus_panels(self) -> None:
        """Focus the panel that had the focus before."""
        slots: Any = self.rows.trace_screen.slots
        shown: list[Widget] = slots.views()
        before = [view for view in shown if view is self._focused_before]
        next(iter(before), slots.current()).focus()

    def _show(self, is_shown: bool) -> None:
        if is_shown and not self.display:
            self.rows.list_other_traces()
        self.display = is_shown


def draw_row(
    row: Row,
    data: RailData,
    verdicts: Mapping[Path, TraceVerdict],
    pen: Pen,
    here: Row,
    cursor: Row | None,
) -> Strip:
    """Return the line of a row: a mark at the place, its text, and at the right its verdict."""
    if row.kind == "heading":
        return pen.line((row.key, "title"))
    text, style, note, note_style = f"… {row.key}", "text", "", "muted"
    if row.kind == "answer" and row.key in data.answers:
        line = data.answers[row.key]
        sign = {None: " ", True: "✓", False: "✖"}[line.is_correct]
        width = max(2, len(str(max(data.answers) + 1)))
        text = f"{row.key + 1:>{width}} {sign} {line.text}"
        errors, warnings = line.problems
        note, note_style = (f"✖ {errors}", "bad") if errors else (f"▲ {warnings}", "warn")
        note = note if errors or warnings else ""
    elif row.kind == "branch" and row.key in data.branches:
        text = f"   ┣ {row.key} {rail_data.describe_fork(data.branches[row.key])}"
    elif row.kind == "capture":
        text, style = f"● {data.captures.get(row.key, row.key.stem)}", "accent"
    elif row.kind == "trace":
        verdict = verdicts.get(row.key, TraceVerdict("…"))
        answer = f" “{verdict.answer}”" if verdict.answer else ""
        text, note = escape_unprintable(row.key.stem + answer), verdict.text
        note_style = _VERDICT_STYLES.get(verdict.color, "muted")
    if row == here:
        style = "chosen"
    if row == cursor:
        style = note_style = "cursor"
    room = pen.width - 2 - (cell_len(note) + 1 if note else 0)
    mark = "▸ " if row == here else "  "
    return pen.line(
        (mark, style), (clip_text(text, room), style), (f" {note}" if note else "", note_style)
    )
