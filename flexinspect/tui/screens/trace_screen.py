"""The screen of a trace: panels around a current place, live or afterwards.

It follows the trace and the capture, runs the rules that have not checked the trace yet, and passes
the actions of keys to the objects that do them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import all_keys
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.panel_registry import option_names
from flexinspect.panels.xray import DIRECTIONS, WEIGHTS, Direction, WeightsOf
from flexinspect.trace.reader import TraceReader
from flexinspect.tui import trace_session
from flexinspect.tui.branch_commands import BranchCommands
from flexinspect.tui.capture_commands import CaptureCommands
from flexinspect.tui.code_editor import open_code
from flexinspect.tui.diagnosis_card import DiagnosisCard
from flexinspect.tui.finding_commands import FindingCommands
from flexinspect.tui.follow_pace import FollowPace
from flexinspect.tui.key_line import KeyLine, actions_to_show
from flexinspect.tui.load_threads import LoadThreads
from flexinspect.tui.navigation import Navigation, StepReplay, clamp_place
from flexinspect.tui.panel_layout import Slots
from flexinspect.tui.panel_view import LoadedCanvas, PanelView
from flexinspect.tui.place_frames import PlaceFrames, next_place
from flexinspect.tui.saved_files import save_declaration, save_picture
from flexinspect.tui.screens.dialogs import HelpScreen
from flexinspect.tui.screens.text_screens import TextScreen
from flexinspect.tui.side_rail import RailList, SideRail
from flexinspect.tui.status_lines import StatusBanner, TokenStrip, TraceHeader
from flexinspect.tui.step_timeline import StepTimeline
from flexinspect.tui.token_search import TokenSearch
from flexinspect.tui.trace_session import CaptureClient, CaptureStatus, RunStatus, TraceSession

if TYPE_CHECKING:
    from textual.command import Provider


def bindings() -> list[BindingType]:
    """Return the table of keys as Textual's bindings."""
    return [
        Binding(
            ",".join(key.keys),
            f"do('{key.id}')",
            key.label or key.text,
            show=bool(key.label),
            id=key.id,
            tooltip=key.text,
        )
        for key in all_keys()
    ]


def _key_commands() -> type[Provider]:
    from flexinspect.tui.screens.command_palette import KeyCommands

    return KeyCommands


PAGE = 10
POLL_S = 0.25
"""Interval between status requests to a running capture; each takes a millisecond of a thread."""

NEED_MODEL = (
    *("run.pause", "run.step", "run.breakpoints"),
    *("travel.restore", "travel.fork", "travel.mask"),
)
"""Actions that say at once if the run has ended, before they ask or move anything."""

NEED_STEPS = (
    *("step.next", "step.previous", "step.first", "step.last", "step.ten_forward", "step.ten_back"),
    *("step.goto", "step.replay", "tokens.next", "tokens.previous"),
    *("tokens.xray", "tokens.weights", "tokens.match"),
)
"""Actions that say so at once if no step is recorded: they would do nothing."""

N_THREADS = 2
"""Threads that load what the screen shows."""


class TraceScreen(Screen[None]):
    """Shows a trace at a current place, navigates in it, and controls its capture."""

    BINDINGS: ClassVar[list[BindingType]] = bindings()
    COMMANDS: ClassVar[set[Any]] = {_key_commands}
    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False)
    following: reactive[bool] = reactive(True, repaint=False)
    capture_status: reactive[CaptureStatus] = reactive(CaptureStatus(), repaint=False, init=False)
    version: reactive[int] = reactive(0, repaint=False)
    xray: reactive[Direction] = reactive[Direction]("off", repaint=False)
    weights: reactive[WeightsOf] = reactive[WeightsOf]("off", repaint=False)
    cell: tuple[int, int] | None = None
    """The positions of the row and key that are selected in the mask, None before a selection."""

    def __init__(
        self, session: TraceSession, place: TracePlace | None = None, *, has_tour: bool = False
    ) -> None:
        super().__init__()
        self._has_tour = has_tour
        self._session, self.capture = session, CaptureClient(session)
        self._pool = LoadThreads(N_THREADS, "flexinspect-load")
        self._card = DiagnosisCard(session, self._pool)
        self.status = RunStatus()
        self._last_review: tuple[Path | None, int] | None = None
        self._initial_place = place
        self._last_error = ""
        self.navigation = navigation = Navigation(self)
        self.search = TokenSearch(self, navigation)
        self.findings = FindingCommands(self, session, navigation, self._card)
        self.replay = StepReplay(self, navigation)
        self.commands = CaptureCommands(self, session, navigation)
        self.branches = BranchCommands(self, session, navigation, self.commands)
        self.frames = PlaceFrames(self, self._shown_canvases)
        if place is not None:
            self.set_reactive(TraceScreen.place, place)
            self.set_reactive(TraceScreen.following, False)

    def compose(self) -> ComposeResult:
        yield TraceHeader(self._session, self._pool)
        yield TokenStrip(self._session, self._pool)
        yield StepTimeline(self._session, self._pool)
        yield StatusBanner()
        yield self._card
        yield Slots(self._session, self._pool, has_tour=self._has_tour)
        yield SideRail(self._session, self._pool)
        if self._has_tour:
            from flexinspect.tui.guided_tour import TourLine

            yield TourLine(self.keys_of)
        yield KeyLine(self.action_do, self._list_actions)

    def on_mount(self) -> None:
        """Read the trace before the first frame, so that this shows the actual status."""
        self.poll_trace()
        self._poll_while_live()
        self.poll_capture()
        self.slots.current().focus()
        for name in ("capture_status", "following", "place", "version"):
            self.watch(self, name, self._show_keys, init=False)

    def on_screen_suspend(self) -> None:
        """Let the tour say how to close the window that takes the keys."""
        self._cover_tour(is_covered=True)

    def on_screen_resume(self) -> None:
        """Go on with the tour."""
        self._cover_tour(is_covered=False)

    def _cover_tour(self, *, is_covered: bool) -> None:
        if self._has_tour:
            from flexinspect.tui.guided_tour import TourLine

            for line in self.query(TourLine):
                line.cover(is_covered=is_covered)

    def on_resize(self, event: events.Resize) -> None:
        """Give the card the lines that the panels can spare."""
        self._card.fit_screen(event.size.height)
        self.query_one(StepTimeline).fit_screen(event.size.height)
        self.query_one(SideRail).fit_screen(event.size.width)

    @on(events.DescendantFocus)
    @on(Slots.Changed)
    def _handle_panel_change(self) -> None:
        """Show the keys of the focused panel, the X-ray and the cell in one that has appeared."""
        if not self.slots.views():
            return
        self._show_keys()
        self._select_cell()
        if self.xray != "off":
            self._share_xray()

    @on(DiagnosisCard.Shown)
    @on(PanelView.EffectsChanged)
    def _show_keys(self) -> None:
        if not self.slots.views():  # before they are made, and while the screen closes
            return
        for key_line in self.query(KeyLine):
            key_line.repaint()

    def _list_actions(self) -> Iterator[str]:
        panel = self.slots.current().panel
        return actions_to_show(
            self.status,
            self.capture_status,
            panel,
            generation=self.place.generation,
            following=self.following,
            has_finding=self._card.finding is not None,
            has_effect=self.slots.current().has_effect,
        )

    def on_unmount(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A load that still runs may open the trace again, so it is closed after the last of them.
        threading.Thread(target=self._close_after_loads, name="flexinspect-close").start()

    def _close_after_loads(self) -> None:
        if self._pool.join():
            self._session.close()

    @property
    def reader(self) -> TraceReader | None:
        """The reader of the trace, None before there is one."""
        return self._session.reader

    def keys_of(self, name: str) -> str:
        """Return the configured keys of an action."""
        app: Any = self.app
        return str(app.keys_of(name))

    @property
    def slots(self) -> Slots:
        return self.query_one(Slots)

    # -- the trace -------------------------------------------------------------------------------

    @work(exclusive=True, group="watch")
    async def _poll_while_live(self) -> None:
        """Poll the trace while it may grow; a poll without changes takes microseconds."""
        pace = FollowPace()
        while self.status.live:
            await asyncio.sleep(pace.pause_s())
            if not self.query(StatusBanner):
                return  # the interface is closing
            self.poll_trace()
            self._show_banner(self.status)

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
        self._show_banner(status)
        messages = self._session.debugger_messages
        while messages:  # such as where to attach
            self.notify(escape_unprintable(messages.popleft()), timeout=15)
        if self.following and moved_on and self.navigation.forked == self.place.branch:
            self.navigation.stay_in_fork()
        elif self.following and moved_on and (status.live or self.version):
            self.navigation.go_to_newest_generation()
            return
        if self.version == 0 and (self._initial_place is not None or not status.live):
            self._start_at(self._initial_place or replace(self.place, step=status.first_step))
        elif self.following and status.last_step is not None:
            self.place = replace(self.place, step=status.last_step, pos=None)
        self.version += 1
        if not status.live:
            self.review_once()
        elif self.capture_status.state == "holding":
            self.review_once(status.generations)

    def _show_banner(self, status: RunStatus) -> None:
        is_paused = self.capture_status.state == "paused"
        self.query_one(StatusBanner).show_status(status, is_paused=is_paused)

    def _start_at(self, place: TracePlace) -> None:
        """Go to the requested place, or to the nearest one in the trace."""
        self.set_reactive(TraceScreen.following, False)
        newest = max(self.status.generations - 1, 0)
        if place.generation > newest:
            message = f"There is no generation {place.generation}; the last one is {newest}."
            self.notify(message, severity="warning")
            self._initial_place = replace(place, generation=newest)
            self.set_hidden_place(self._initial_place)
            self.poll_trace()
        else:
            self.place = place

    def validate_place(self, place: TracePlace) -> TracePlace:
        return clamp_place(place, self.status)

    def set_hidden_place(self, place: TracePlace) -> None:
        """Set a place that is not shown, to read the trace there."""
        self.set_reactive(TraceScreen.place, place)

    def watch_place(self, old: TracePlace, new: TracePlace) -> None:
        """Show the new place in one frame instead of panel by panel."""
        self.frames.show(next_place(old, new, self.status))

    def _shown_canvases(self) -> list[LoadedCanvas]:
        kinds = (TraceHeader, TokenStrip, StepTimeline, RailList)
        return [*(self.query_one(kind) for kind in kinds), self._card, *self.slots.views()]

    # -- selections that panels share ------------------------------------------------------------

    def _next_xray(self) -> None:
        """Show what the token sees, then what sees it, then neither, in the strip and the panel."""
        self.xray = DIRECTIONS[(DIRECTIONS.index(self.xray) + 1) % len(DIRECTIONS)]
        self._share_xray()

    def _next_weights(self) -> None:
        """Weight what the token sees by the attention of its head, of more heads, or of none."""
        if self.xray == "sees" or self.weights == "off":
            self.weights = WEIGHTS[(WEIGHTS.index(self.weights) + 1) % len(WEIGHTS)]
        self.xray = "sees"
        self._share_xray()

    def _share_xray(self) -> None:
        for view in self.slots.views():
            if view.panel.name == "tokens":
                view.change_options(replace(view.options, xray=self.xray, weights=self.weights))

    @on(PanelView.CellSelected)
    def _share_cell(self, event: PanelView.CellSelected) -> None:
        """Select a cell of the mask in the other panels that show one."""
        self.cell = event.cell
        self._select_cell()

    def _select_cell(self) -> None:
        for view in self.slots.views():
            if self.cell is not None and {"q", "kv"}.issubset(option_names(view.panel)):
                q, kv = self.cell
                view.change_options(replace(view.options, q=q, kv=kv))

    # -- actions ---------------------------------------------------------------------------------

    def action_do(self, name: str) -> None:
        """Run the action of a key or of the palette, by its id in `flexinspect.core.keyboard`."""
        self.slots.ensure_loaded()  # a key typed ahead of the first frame acts on the real panels
        action = self._key_actions().get(name)
        if name in NEED_MODEL and not self.status.live:
            self.notify(self._session.missing_model().sentence(), severity="warning")
        elif name in NEED_STEPS and self.status.last_step is None:
            self.notify(f"No step {'is recorded yet' if self.status.live else 'was recorded'}.")
        elif action is not None:
            self._run(action)
        else:
            self.slots.handle_action(name)
        if self._has_tour:
            from flexinspect.tui.guided_tour import TourLine

            self.query_one(TourLine).note_action(name)

    def _run(self, action: Callable[[], object]) -> None:
        """Run an action; one that waits for an answer goes on as a worker."""
        try:
            rest = action()
        except FlexInspectError as error:
            self.show_error(error)
        else:
            if asyncio.iscoroutine(rest):
                self.run_worker(self._show_errors(rest), group="action")

    async def _show_errors(self, action: Awaitable[object]) -> None:
        try:
            await action
        except FlexInspectError as error:
            self.show_error(error)

    @on(DiagnosisCard.Opened)
    def _read_finding(self) -> None:
        self._run(self.findings.read_finding)

    @on(LoadedCanvas.NavigationRequest)
    def _handle_navigation(self, event: LoadedCanvas.NavigationRequest) -> None:
        self.navigation.jump(event.target)

    @on(RailList.TraceRequest)
    def _open_other_trace(self, event: RailList.TraceRequest) -> None:
        opening = self.commands.open_instead(event.path)
        self.run_worker(opening, exclusive=True, group="leave")

    def _show_messages(self) -> None:
        app: Any = self.app
        self.app.push_screen(TextScreen("Messages, the newest first", app.messages()))

    def show_error(self, error: FlexInspectError) -> None:
        """Show an error, unless it is the same as the last one."""
        if self._last_error != error.message:
            self._last_error = error.message
            self.notify(error.sentence(), severity="error", timeout=20)

    # -- status ----------------------------------------------------------------------------------

    @work(exclusive=True, group="status")
    async def poll_capture(self) -> None:
        """Update the status of the capture while there is one."""
        while self.status.live:
            self.capture_status = await asyncio.to_thread(self.capture.poll)
            await asyncio.sleep(POLL_S)
        self.capture_status = CaptureStatus()

    def watch_capture_status(self, old: CaptureStatus, new: CaptureStatus) -> None:
        """Notify when the capture pauses, with the reason: the header has no room for it."""
        status = new.status
        if status is not None and new.state == "paused" and old.state != "paused":
            self.commands.notify_paused(status)
        if new.debugger_stop and new.debugger_stop != old.debugger_stop:
            self.notify(escape_unprintable(new.debugger_stop), severity="warning")
        if new.state == "holding" and self.status.live:
            self.review_once(self.status.generations)

    # -- rules -----------------------------------------------------------------------------------

    def review_once(self, n_held: int = 0) -> None:
        """Run the pending rules in the background, once per file.

        While the model is held after `n_held` generations, they run once for each number of
        generations. These findings cannot be stored, so the rules run again when the trace is
        finished.
        """
        if self._last_review != (self._session.path, n_held):
            self._last_review = (self._session.path, n_held)
            if not n_held and self.reader is not None:
                self.reader.remove_added_reviews()
            self._review()

    @work(exclusive=True, group="review")
    async def _review(self) -> None:
        await self.slots.loaded.wait()
        await asyncio.sleep(trace_session.REVIEW_DELAY_S)
        message = await trace_session.review_in_background(self._session, self._pool)
        if message is not None:
            self.poll_trace()
        if message:
            self.notify(message, severity="warning", timeout=20)

    def _show_code(self) -> None:
        """Show the code of the mask with the values of the selected cell.

        That of a suspect border is the first one that the border closes.
        """
        self.slots.bring_panel("code")
        finding = self._card.finding
        if self.cell is None and finding is not None and finding.id == "segments.suspect-border":
            border = finding.positions[0]
            self.cell = (border, max(border - 1, 0))
        self._select_cell()
        self.slots.focus_panel("code")

    async def _answer_exhibit(self) -> None:
        from flexinspect.tui.screens.exhibit_screen import ask_fault

        await ask_fault(self.app, self.reader.run().get("exhibit") if self.reader else None)

    # -- windows and pictures --------------------------------------------------------------------

    def _save_picture(self, view: PanelView | None = None) -> None:
        save_picture(self.app, self._session.path, self.place, view)

    def _help(self) -> None:
        from flexinspect.tui.screens.command_palette import help_rows

        panel = self.slots.current().panel
        rows = help_rows(self.keys_of, panel.title, panel.actions)
        self.app.push_screen(HelpScreen(panel.title, panel.help, rows))

    def _show_glossary(self) -> None:
        from flexinspect.tui.screens.text_screens import GlossaryScreen

        self.app.push_screen(GlossaryScreen())

    def _key_actions(self) -> dict[str, Callable[[], object]]:
        """Return the actions of the table by their ids, without those of panels."""
        go = self.navigation
        return {
            "run.pause": self.commands.toggle_pause,
            "run.step": self.commands.step_once,
            "run.breakpoints": self.commands.edit_breakpoints,
            "travel.restore": lambda: self.branches.rewind("restore"),
            "travel.fork": lambda: self.branches.rewind("fork"),
            "travel.mask": lambda: self.branches.rewind("edit"),
            "branch.choose": self.branches.choose_branch,
            "branch.compare": self.branches.compare_branch,
            "code.open": lambda: open_code(self.app, self.reader, self.place, self._card.finding),
            "code.show": self._show_code,
            "step.next": lambda: go.move_by(1),
            "step.previous": lambda: go.move_by(-1),
            "step.ten_forward": lambda: go.move_by(PAGE),
            "step.ten_back": lambda: go.move_by(-PAGE),
            "step.first": lambda: go.jump(Navigate(step=self.status.first_step)),
            "step.last": lambda: go.jump(Navigate(step=self.status.last_step or 0)),
            "step.goto": self.search.ask_step,
            "step.follow": go.follow,
            "step.replay": self.replay.toggle,
            "tokens.search": self.search.ask_search,
            "tokens.match": self.search.next_match,
            "tokens.next": lambda: go.move_pos(1),
            "tokens.previous": lambda: go.move_pos(-1),
            "tokens.xray": self._next_xray,
            "tokens.weights": self._next_weights,
            "finding.next": lambda: self.findings.go_to_finding(1),
            "finding.previous": lambda: self.findings.go_to_finding(-1),
            "finding.read": self.findings.read_finding,
            "place.back": go.go_back,
            "mask.declare": lambda: save_declaration(self.app, self.reader, self.place.generation),
            "exhibit.answer": self._answer_exhibit,
            "generation.next": lambda: go.go_to_branch(self.place.generation + 1, 0),
            "generation.previous": lambda: go.go_to_branch(self.place.generation - 1, 0),
            "layer.next": lambda: go.navigate(Navigate(layer=self.place.layer + 1)),
            "layer.previous": lambda: go.navigate(Navigate(layer=self.place.layer - 1)),
            "head.next": lambda: go.navigate(Navigate(head=self.place.head + 1)),
            "head.previous": lambda: go.navigate(Navigate(head=self.place.head - 1)),
            "panel.next": lambda: self.slots.cycle_focus(1),
            "panel.previous": lambda: self.slots.cycle_focus(-1),
            "panel.choose": self.slots.choose_panel,
            "panel.maximize": lambda: self.slots.toggle_maximized(),
            "panel.more": lambda: self.slots.change_count(1),
            "panel.fewer": lambda: self.slots.change_count(-1),
            "panel.reset": lambda: self.slots.reset(),
            "rail.toggle": lambda: self.query_one(SideRail).toggle(),
            "panel.export": lambda: self._save_picture(self.slots.current()),
            "screen.shot": self._save_picture,
            "app.palette": self.app.action_command_palette,
            "app.theme": self.app.search_themes,
            "app.help": self._help,
            "app.messages": self._show_messages,
            "app.glossary": self._show_glossary,
            "run.stop": self.commands.stop,
            "app.quit": self.commands.quit,
        }
