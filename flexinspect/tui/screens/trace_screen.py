"""The screen of a trace: panels around a current place, live or afterwards.

It also saves pictures of the whole screen and of one panel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.reactive import reactive
from textual.widgets import Footer

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import all_keys
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.findings_panel import navigate_to_finding, next_finding
from flexinspect.panels.panel_registry import panel_names
from flexinspect.trace.query_results import FindingRow
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.capture_client import CaptureClient, CaptureStatus
from flexinspect.tui.panel_layout import Slots, format_panel_option
from flexinspect.tui.panel_view import Loader, PaintBatch, PanelView, theme_of
from flexinspect.tui.screens.dialogs import ChoiceDialog, HelpScreen
from flexinspect.tui.screens.key_bindings import KeyCommands, bindings
from flexinspect.tui.screens.navigation import SearchScreen, clamp_place, extrapolate_place
from flexinspect.tui.status_lines import FindingLine, StatusBanner, TraceHeader
from flexinspect.tui.token_strip import TokenStrip
from flexinspect.tui.trace_session import RunStatus, TraceSession


def picture_file(trace: Path | None, place: TracePlace, name: str) -> Path:
    """Return a new file name in the current folder, of trace, `name`, place and time of day."""
    stem = trace.stem if trace else "flexinspect"
    where = f"g{place.generation}-s{place.step}"
    return Path.cwd() / f"{stem}-{name}-{where}-{time.strftime('%H%M%S')}.svg"


def save_screen(app: Any, path: Path) -> Path | None:
    """Save the screen as SVG, or deliver it to the browser. Raises `OSError`."""
    if app.is_web:
        app.deliver_screenshot(path.name)
        return None
    part = path.with_name(f".{path.name}.part")
    part.write_text(app.export_screenshot(title=path.stem, simplify=True), encoding="utf-8")
    part.replace(path)
    return path


def save_panel(view: PanelView, path: Path) -> Path:
    """Save the picture of a panel as SVG. Raises `FlexInspectError`."""
    from flexinspect.drawing.export import save

    save(path, list(view.strips), title=view.panel.title, theme=theme_of(view.app))
    return path


POLL_EVERY_S = 0.05
PAGE = 10
N_THREADS = 2


class TraceScreen(SearchScreen):
    """Shows a trace at a current place and navigates in it, live or afterwards."""

    BINDINGS: ClassVar[list[BindingType]] = bindings()
    COMMANDS: ClassVar[set[Any]] = {KeyCommands}
    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False)
    version: reactive[int] = reactive(0, repaint=False)
    following: reactive[bool] = reactive(True, repaint=False)

    def __init__(self, session: TraceSession, place: TracePlace | None = None) -> None:
        super().__init__()
        self._session, self.capture = session, CaptureClient(session)
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="flexinspect-load")
        self._initial_place = place
        self._finding: FindingRow | None = None
        self.status = RunStatus()
        self._paint_batch = PaintBatch(self._loaders, self._preload_next)
        self._next_place: TracePlace | None = None
        if place is not None:
            self.set_reactive(TraceScreen.place, place)
            self.set_reactive(TraceScreen.following, False)

    def compose(self) -> ComposeResult:
        """Yield header, token strip, banner, panels, finding line and footer."""
        findings = FindingLine()
        bound = (TraceScreen.place, TraceScreen.version)
        yield TraceHeader(self._session, self._pool, findings).data_bind(
            *bound, TraceScreen.following
        )
        yield TokenStrip(self._session, self._pool).data_bind(*bound)
        yield StatusBanner()
        yield Slots(self._session, self._pool).data_bind(*bound)
        yield findings
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Read the trace before the first frame, so that this shows the actual status."""
        self.poll_trace()
        self._poll_while_live()
        self.poll_capture()
        self.slots.current().focus()

    def on_unmount(self) -> None:
        """Shut down the threads that load."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def reader(self) -> TraceReader | None:
        """The reader of the trace, None before there is one."""
        return self._session.reader

    @property
    def is_live(self) -> bool:
        """Whether the trace may still grow."""
        return self.status.live

    def watch_capture_status(self, old: CaptureStatus, new: CaptureStatus) -> None:
        """Show the status of the capture in the header."""
        super().watch_capture_status(old, new)
        self.query_one(TraceHeader).capture_status = new
        if new.state == "holding" and self.status.live:
            self.review_once(self._session, self._pool, self.status.generations)

    @property
    def slots(self) -> Slots:
        """The panels."""
        return self.query_one(Slots)

    # -- the trace -------------------------------------------------------------------------------

    @work(exclusive=True, group="watch")
    async def _poll_while_live(self) -> None:
        """Poll the trace while it may grow; a poll without changes takes microseconds."""
        while self.status.live:
            await asyncio.sleep(POLL_EVERY_S)
            if not self.query(StatusBanner):
                return  # the interface is closing
            self.poll_trace()
            self.query_one(StatusBanner).show_status(self.status)

    def poll_trace(self) -> None:
        """Show what has changed in the trace since the last poll."""
        try:
            status = self._session.poll(self.place.generation, self.place.branch)
        except FlexInspectError as error:
            if not self._session.is_trace_removed:
                self.show_error(error)
            if not self.version and self._session.process is None:
                self.apply_status(
                    RunStatus("damaged", phase="", error_lines=(escape_unprintable(error.message),))
                )
            return
        if status is not None:
            self.apply_status(status)

    def apply_status(self, status: RunStatus) -> None:
        """Show a new status, and go to the newest step while following."""
        moved_on = status.generations - 1 > self.place.generation
        self.status = status
        self.query_one(TraceHeader).status = status
        self.query_one(StatusBanner).show_status(status)
        self.show_debugger_messages(self._session.debugger_messages)
        if self.following and moved_on and (status.live or self.version):
            self.place = TracePlace(
                status.generations - 1, layer=self.place.layer, head=self.place.head
            )
            self.poll_trace()
            return
        if self.version == 0 and (self._initial_place is not None or not status.live):
            self._start_at(self._initial_place or replace(self.place, step=status.first_step))
        elif self.following and status.last_step is not None:
            self.place = replace(self.place, step=status.last_step, pos=None)
        self.version += 1
        if not status.live:
            self.review_once(self._session, self._pool)
        elif self.capture_status.state == "holding":
            self.review_once(self._session, self._pool, status.generations)

    def _start_at(self, place: TracePlace) -> None:
        """Go to the requested place, or to the nearest one in the trace."""
        self.set_reactive(TraceScreen.following, False)
        newest = max(self.status.generations - 1, 0)
        if place.generation > newest:
            message = f"There is no generation {place.generation}; the last one is {newest}."
            self.notify(message, severity="warning", markup=False)
            self._initial_place = replace(place, generation=newest)
            self.set_reactive(TraceScreen.place, self._initial_place)
            self.poll_trace()
        else:
            self.place = place

    def validate_place(self, place: TracePlace) -> TracePlace:
        """Keep the place within the trace."""
        return clamp_place(place, self.status)

    def watch_place(self, old: TracePlace, new: TracePlace) -> None:
        """Show the new place in one frame instead of panel by panel."""
        self._next_place = None if self.status.live else extrapolate_place(old, new)
        if self.is_mounted:
            self._paint_batch.begin(self)

    def _preload_next(self) -> None:
        """Load in advance the place that the same key would go to next."""
        if self._next_place is None:
            return
        place = self.validate_place(self._next_place)
        if place != self.place:
            self.query_one(TraceHeader).preload(place)
            self.query_one(TokenStrip).preload(place)
            for view in self.slots.views():
                view.preload(place)

    def _loaders(self) -> list[Loader[Any, Any]]:
        own = [self.query_one(TraceHeader).loader, self.query_one(TokenStrip).loader]
        return own + [view.loader for view in self.slots.views()]

    # -- navigation ------------------------------------------------------------------------------

    def navigate(self, target: Navigate) -> None:
        """Go to the place that a panel, a dialog or a key requests; stop following."""
        self._go_to_branch(target.generation, target.branch)
        place = self.place
        if target.step is not None:
            self.following = False
            place = replace(place, step=target.step, pos=target.pos)
        values = {"layer": target.layer, "head": target.head}
        self.place = replace(place, **{k: v for k, v in values.items() if v is not None})
        if target.panel is not None:
            self.slots.show_panel(target.panel)

    def _go_to_step(self, step: int) -> None:
        self.place = replace(self.place, step=step, pos=None)

    def _move_by(self, n: int) -> None:
        self.following = False
        self._go_to_step(self.place.step + n)

    def _go_to_branch(self, generation: int | None, branch: int | None) -> None:
        """Go to the first step of another generation or branch; the current one is ignored."""
        place = self.place
        generation = place.generation if generation is None else generation
        branch = place.branch if branch is None else branch
        same = (generation, branch) == (place.generation, place.branch)
        if same or not 0 <= generation < max(self.status.generations, 1):
            return
        self.following = False
        # The bounds of the step are those of the old branch until the new one has been polled.
        there = replace(place, generation=generation, branch=branch, pos=None)
        self.set_reactive(TraceScreen.place, there)
        self.poll_trace()
        self.set_reactive(TraceScreen.place, place)  # else an equal step would not be a change
        self.place = replace(there, step=self.status.first_step)

    def action_do(self, name: str) -> None:
        """Run the action of a key or of the palette, by its id in `flexinspect.core.keyboard`."""
        action = self._key_actions().get(name)
        if action is not None:
            try:
                action()
            except FlexInspectError as error:
                self.show_error(error)
        elif name.startswith("panel.show-"):
            self._show_panel_number(int(name.rpartition("-")[2]))
        else:
            self.slots.handle_action(name)

    def follow(self) -> None:
        """Follow the newest step."""
        self.following = True
        newest = self.status.generations - 1
        if self.status.live and newest > self.place.generation:
            self.place = TracePlace(newest, layer=self.place.layer, head=self.place.head)
            self.poll_trace()
        if self.status.last_step is not None:
            self._go_to_step(self.status.last_step)

    def _go_to_finding(self, direction: Literal[1, -1]) -> None:
        """Go to the next finding, wrapping around; findings at one place are visited in turn."""
        reader = self._session.reader
        if reader is None:
            return
        row = next_finding(reader, self.place, direction, self._finding)
        if row is None:
            self.notify("There is no finding in this trace.", markup=False)
            return
        self._finding = row
        self.navigate(navigate_to_finding(row.finding))
        self.query_one(FindingLine).show_finding(row.finding)

    @work
    async def _choose_panel(self) -> None:
        options = [(name, format_panel_option(name)) for name in panel_names()]
        answer = await self.app.push_screen_wait(ChoiceDialog("Show here", options))
        if answer:
            self.slots.show_panel(answer)

    def _show_panel_number(self, number: int) -> None:
        names = panel_names()
        if number <= len(names):
            self.slots.show_panel(names[number - 1])

    @on(PanelView.NavigationRequest)
    @on(TokenStrip.TokenClicked)
    def _handle_navigation(
        self, event: PanelView.NavigationRequest | TokenStrip.TokenClicked
    ) -> None:
        self.navigate(event.target)

    # -- pictures, help, quitting -----------------------------------------------------------------

    def _save_picture(self, name: str, save: Callable[[Path], Path | None]) -> None:
        """Save a picture in the current folder and notify the user."""
        file = picture_file(self._session.path, self.place, name)
        try:
            path = save(file)
            self.notify(f"Saved {path}" if path else "Saved by the browser", markup=False)
        except FlexInspectError as error:
            self.show_error(error)
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(f"{file} was not saved: {reason}.", severity="error", markup=False)

    def _save_screenshot(self) -> None:
        self._save_picture("screen", lambda file: save_screen(self.app, file))

    def _save_panel(self) -> None:
        view = self.slots.current()
        self._save_picture(view.panel.name, lambda file: save_panel(view, file))

    def _help(self) -> None:
        panel = self.slots.current().panel
        rows = [(self.keys_of(key.id), key.text) for key in all_keys()]
        self.app.push_screen(HelpScreen(panel.title, panel.help.lines(), rows))

    def _stop(self) -> None:
        """Ask the run to end after this step; the second time, kill it."""
        if (
            self._session.process is None
            and self.status.live
            and self.capture_status.status is not None
        ):
            self._run_command(lambda client: client.stop())
        elif self._session.process is None or not self.status.live:
            self.notify(f"Nothing is running; {self.keys_of('app.quit')} quits.", markup=False)
        elif self._session.is_stopping:
            self._session.kill()
        else:
            self._session.interrupt()
            self.notify("Stopping after this step; again ends it at once.", markup=False)

    def keys_of(self, name: str) -> str:
        """Return the configured keys of an action."""
        app: Any = self.app
        return str(app.keys_of(name))

    @work
    async def _quit(self) -> None:
        if self._session.process is not None and self.status.live:
            answer = await self._ask_about_run()
            if answer == "end":
                self._session.is_ending = True
            elif answer == "stop":
                self._session.interrupt()
            elif answer != "leave" or not self._leave_running():
                return
        self.app.exit()

    async def _ask_about_run(self) -> str | None:
        """Ask whether the run stops or continues; one that only holds its model is ended."""
        if self.capture_status.state == "holding":
            return "end" if await self.call_capture(lambda client: client.stop()) else "stop"
        options = [
            ("stop", "Stop the run after this step and quit; the trace stays valid"),
            ("stay", "Go on"),
            ("leave", "Quit, and let the run go on by itself"),
        ]
        return await self.app.push_screen_wait(ChoiceDialog("The model is still running.", options))

    def _leave_running(self) -> bool:
        if self._session.detach():
            return True
        text = "This run cannot go on without the interface."
        self.notify(text, severity="warning", markup=False)
        return False

    def _key_actions(self) -> dict[str, Callable[[], object]]:
        """Return the actions of the table by their ids, without those of panels."""
        return {
            **self.control_actions(),
            "step.next": lambda: self._move_by(1),
            "step.previous": lambda: self._move_by(-1),
            "step.forward": lambda: self._move_by(PAGE),
            "step.back": lambda: self._move_by(-PAGE),
            "step.first": lambda: self._move_by(-self.place.step),
            "step.last": lambda: self._move_by((self.status.last_step or 0) - self.place.step),
            "step.goto": self.ask_step,
            "step.follow": self.follow,
            "tokens.search": self.ask_search,
            "tokens.match": self.next_match,
            "finding.next": lambda: self._go_to_finding(1),
            "finding.previous": lambda: self._go_to_finding(-1),
            "generation.next": lambda: self._go_to_branch(self.place.generation + 1, 0),
            "generation.previous": lambda: self._go_to_branch(self.place.generation - 1, 0),
            "layer.next": lambda: self.navigate(Navigate(layer=self.place.layer + 1)),
            "layer.previous": lambda: self.navigate(Navigate(layer=self.place.layer - 1)),
            "head.next": lambda: self.navigate(Navigate(head=self.place.head + 1)),
            "head.previous": lambda: self.navigate(Navigate(head=self.place.head - 1)),
            "panel.next": lambda: self.slots.cycle_focus(1),
            "panel.previous": lambda: self.slots.cycle_focus(-1),
            "panel.choose": self._choose_panel,
            "panel.maximize": lambda: self.slots.toggle_maximized(),
            "panel.more": lambda: self.slots.change_count(1),
            "panel.fewer": lambda: self.slots.change_count(-1),
            "panel.export": self._save_panel,
            "screen.shot": self._save_screenshot,
            "app.palette": self.app.action_command_palette,
            "app.theme": self.app.search_themes,
            "app.help": self._help,
            "run.stop": self._stop,
            "app.quit": self._quit,
        }
