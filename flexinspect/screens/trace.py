"""The trace screen: owns the place, the layout, and what keys do. Panels are bound to it."""

from __future__ import annotations

import asyncio
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

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed, Status
from flexinspect.keys import all_keys
from flexinspect.panels.base import Go, Place
from flexinspect.panels.findings import next_finding, place_of
from flexinspect.panels.registry import panel_names
from flexinspect.screens import shots
from flexinspect.screens.ask import Choose, HelpScreen
from flexinspect.screens.commands import KeyCommands, bindings
from flexinspect.screens.facts import FactLines, FindingLine
from flexinspect.screens.frame import Frame
from flexinspect.screens.loader import Loader
from flexinspect.screens.notice import Notice
from flexinspect.screens.panelview import PanelView
from flexinspect.screens.places import onward, within
from flexinspect.screens.remote import Remote, Standing
from flexinspect.screens.seeking import SeekingScreen
from flexinspect.screens.slots import Slots, panel_offer
from flexinspect.screens.strip import TokenStrip
from flexinspect.text import visible
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import FindingRow

LOOK_EVERY_S = 0.05
PAGE = 10
N_THREADS = 2


class TraceScreen(SeekingScreen):
    """Steps through a trace, live or afterwards."""

    BINDINGS: ClassVar[list[BindingType]] = bindings()
    COMMANDS: ClassVar[set[Any]] = {KeyCommands}
    place: reactive[Place] = reactive(Place(), repaint=False)
    version: reactive[int] = reactive(0, repaint=False)
    following: reactive[bool] = reactive(True, repaint=False)

    def __init__(self, feed: Feed, place: Place | None = None) -> None:
        super().__init__()
        self._feed, self.remote = feed, Remote(feed)
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="flexinspect-load")
        self._wanted = place
        self._finding: FindingRow | None = None
        self.status = Status()
        self._frame = Frame(self._loaders, self._look_ahead)
        self._next: Place | None = None
        if place is not None:
            self.set_reactive(TraceScreen.place, place)
            self.set_reactive(TraceScreen.following, False)

    def compose(self) -> ComposeResult:
        """Header, strip, notice, panels, findings, footer."""
        findings = FindingLine()
        bound = (TraceScreen.place, TraceScreen.version)
        yield FactLines(self._feed, self._pool, findings).data_bind(*bound, TraceScreen.following)
        yield TokenStrip(self._feed, self._pool).data_bind(*bound)
        yield Notice()
        yield Slots(self._feed, self._pool).data_bind(*bound)
        yield findings
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Take the first look at once, so that the first picture is the true one."""
        self.look()
        self._watch()
        self.watch_capture()
        self.slots.current().focus()

    def on_unmount(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def reader(self) -> TraceReader | None:
        """The trace, as far as there is one."""
        return self._feed.reader

    @property
    def is_live(self) -> bool:
        """Whether the trace may still grow."""
        return self.status.live

    def watch_standing(self, old: Standing, new: Standing) -> None:
        """Show in the header how the capture stands."""
        super().watch_standing(old, new)
        self.query_one(FactLines).standing = new

    @property
    def slots(self) -> Slots:
        """The panels."""
        return self.query_one(Slots)

    # -- the trace -------------------------------------------------------------------------------

    @work(exclusive=True, group="watch")
    async def _watch(self) -> None:
        """Look at the trace while more may come; asks for microseconds when nothing has."""
        while self.status.live:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self.query(Notice):
                return  # the interface is closing
            self.look()
            self.query_one(Notice).say(self.status)

    def look(self) -> None:
        """Take in what has changed in the trace since the last look."""
        try:
            status = self._feed.look(self.place.generation, self.place.branch)
        except FlexInspectError as error:
            if not self._feed.withdrawn:
                self.complain(error)
            if not self.version and self._feed.process is None:
                self.take(Status("damaged", phase="", words=(visible(error.message),)))
            return
        if status is not None:
            self.take(status)

    def take(self, status: Status) -> None:
        """Show a new status; follow the newest step if that is wanted."""
        moved_on = status.generations - 1 > self.place.generation
        self.status = status
        self.query_one(FactLines).status = status
        self.query_one(Notice).say(status)
        self.tell_of_debugger(self._feed.debugger)
        if self.following and moved_on and (status.live or self.version):
            self.place = Place(status.generations - 1, layer=self.place.layer, head=self.place.head)
            self.look()
            return
        if self.version == 0 and (self._wanted is not None or not status.live):
            self._begin_at(self._wanted or replace(self.place, step=status.first_step))
        elif self.following and status.last_step is not None:
            self.place = replace(self.place, step=status.last_step, pos=None)
        self.version += 1
        if not status.live:
            self.review_once(self._feed, self._pool)

    def _begin_at(self, place: Place) -> None:
        """Stand at a place that was asked for, or at the nearest one that there is."""
        self.set_reactive(TraceScreen.following, False)
        newest = max(self.status.generations - 1, 0)
        if place.generation > newest:
            there = f"There is no generation {place.generation}; the last one is {newest}."
            self.notify(there, severity="warning", markup=False)
            self._wanted = replace(place, generation=newest)
            self.set_reactive(TraceScreen.place, self._wanted)
            self.look()
        else:
            self.place = place

    def validate_place(self, place: Place) -> Place:
        """Keep the place within the trace."""
        return within(place, self.status)

    def watch_place(self, old: Place, new: Place) -> None:
        """Show the new place in one frame, not panel by panel."""
        self._next = None if self.status.live else onward(old, new)
        if self.is_mounted:
            self._frame.begin(self)

    def _look_ahead(self) -> None:
        """Load what the same key would need next: nobody waits for that then."""
        if self._next is None:
            return
        place = self.validate_place(self._next)
        if place != self.place:
            self.query_one(FactLines).expect(place)
            self.query_one(TokenStrip).expect(place)
            for view in self.slots.views():
                view.expect(place)

    def _loaders(self) -> list[Loader[Any, Any]]:
        own = [self.query_one(FactLines).loader, self.query_one(TokenStrip).loader]
        return own + [view.loader for view in self.slots.views()]

    # -- going places ----------------------------------------------------------------------------

    def go(self, go: Go) -> None:
        """Go where a panel, a prompt or a key says; stepping away ends following."""
        self._to_branch(go.generation, go.branch)
        place = self.place
        if go.step is not None:
            self.following = False
            place = replace(place, step=go.step, pos=go.pos)
        values = {"layer": go.layer, "head": go.head}
        self.place = replace(place, **{k: v for k, v in values.items() if v is not None})
        if go.panel is not None:
            self.slots.show_panel(go.panel)

    def _to_step(self, step: int) -> None:
        self.place = replace(self.place, step=step, pos=None)

    def _by(self, n: int) -> None:
        self.following = False
        self._to_step(self.place.step + n)

    def _to_branch(self, generation: int | None, branch: int | None) -> None:
        """Stand at the first step of another generation or branch; nothing for the present one."""
        place = self.place
        generation = place.generation if generation is None else generation
        branch = place.branch if branch is None else branch
        same = (generation, branch) == (place.generation, place.branch)
        if same or not 0 <= generation < max(self.status.generations, 1):
            return
        self.following = False
        # The bounds of the step are those of the old branch until the new one was looked at.
        self.set_reactive(TraceScreen.place, replace(place, generation=generation, branch=branch))
        self.look()
        self.place = replace(self.place, step=self.status.first_step, pos=None)

    def action_do(self, name: str) -> None:
        """Do what a key (or the palette) names: an id of `flexinspect.keys`."""
        answer = self._answers().get(name)
        if answer is not None:
            try:
                answer()
            except FlexInspectError as error:
                self.complain(error)
        elif name.startswith("panel.show-"):
            self._show_number(int(name.rpartition("-")[2]))
        else:
            self.slots.act(name)

    def follow(self) -> None:
        """Follow the newest step."""
        self.following = True
        newest = self.status.generations - 1
        if self.status.live and newest > self.place.generation:
            self.place = Place(newest, layer=self.place.layer, head=self.place.head)
            self.look()
        if self.status.last_step is not None:
            self._to_step(self.status.last_step)

    def _to_finding(self, direction: Literal[1, -1]) -> None:
        """Go to the next finding, round the end; several at one place are met one by one."""
        reader = self._feed.reader
        if reader is None:
            return
        row = next_finding(reader, self.place, direction, self._finding)
        if row is None:
            self.notify("There is no finding in this trace.", markup=False)
            return
        self._finding = row
        self.go(place_of(row.finding))
        self.query_one(FindingLine).tell(row.finding)

    @work
    async def _choose_panel(self) -> None:
        options = [(name, panel_offer(name)) for name in panel_names()]
        answer = await self.app.push_screen_wait(Choose("Show here", options))
        if answer:
            self.slots.show_panel(answer)

    def _show_number(self, number: int) -> None:
        names = panel_names()
        if number <= len(names):
            self.slots.show_panel(names[number - 1])

    @on(PanelView.Went)
    @on(TokenStrip.Went)
    def _went(self, event: PanelView.Went | TokenStrip.Went) -> None:
        self.go(event.go)

    # -- pictures, help, the end -----------------------------------------------------------------

    def _save(self, name: str, save: Callable[[Path], Path | None]) -> None:
        """Save a picture in the folder where the program runs, and say so."""
        file = shots.picture_file(self._feed.path, self.place, name)
        try:
            path = save(file)
            self.notify(f"Saved {path}" if path else "Saved by the browser", markup=False)
        except FlexInspectError as error:
            self.complain(error)
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(f"{file} was not saved: {reason}.", severity="error", markup=False)

    def _shoot(self) -> None:
        self._save("screen", lambda file: shots.save_screen(self.app, file))

    def _export(self) -> None:
        view = self.slots.current()
        self._save(view.panel.name, lambda file: shots.save_panel(view, file))

    def _help(self) -> None:
        panel = self.slots.current().panel
        rows = [(self.keys_of(key.id), key.text) for key in all_keys()]
        self.app.push_screen(HelpScreen(panel.title, panel.help.lines(), rows))

    def _stop(self) -> None:
        """Ask the run to end after this step; asked again, end it at once."""
        if self._feed.process is None and self.status.live and self.standing.status is not None:
            self._command(lambda client: client.stop())
        elif self._feed.process is None or not self.status.live:
            self.notify(f"Nothing is running; {self.keys_of('app.quit')} quits.", markup=False)
        elif self._feed.stopping:
            self._feed.kill()
        else:
            self._feed.interrupt()
            self.notify("Stopping after this step; again ends it at once.", markup=False)

    def keys_of(self, name: str) -> str:
        """Return the keys of an action as the user has them."""
        app: Any = self.app
        return str(app.keys_of(name))

    @work
    async def _quit(self) -> None:
        if self._feed.process is not None and self.status.live:
            answer = await self._ask_about_run()
            if answer == "end":
                self._feed.ending = True
            elif answer == "stop":
                self._feed.interrupt()
            elif answer != "leave" or not self._leave_running():
                return
        self.app.exit()

    async def _ask_about_run(self) -> str | None:
        """Ask what becomes of the run; one that only keeps its model alive is ended unasked."""
        if self.standing.state == "holding":
            return "end" if await self.ask(lambda client: client.stop()) else "stop"
        options = [
            ("stop", "Stop the run after this step and quit; the trace stays valid"),
            ("stay", "Go on"),
            ("leave", "Quit, and let the run go on by itself"),
        ]
        return await self.app.push_screen_wait(Choose("The model is still running.", options))

    def _leave_running(self) -> bool:
        if self._feed.detach():
            return True
        text = "This run cannot go on without the interface."
        self.notify(text, severity="warning", markup=False)
        return False

    def _answers(self) -> dict[str, Callable[[], object]]:
        """Return what each action of the table does; actions of panels are not among them."""
        return {
            **self.commands(),
            "step.next": lambda: self._by(1),
            "step.previous": lambda: self._by(-1),
            "step.forward": lambda: self._by(PAGE),
            "step.back": lambda: self._by(-PAGE),
            "step.first": lambda: self._by(-self.place.step),
            "step.last": lambda: self._by((self.status.last_step or 0) - self.place.step),
            "step.goto": self.ask_step,
            "step.follow": self.follow,
            "tokens.search": self.ask_search,
            "tokens.match": self.next_match,
            "finding.next": lambda: self._to_finding(1),
            "finding.previous": lambda: self._to_finding(-1),
            "generation.next": lambda: self._to_branch(self.place.generation + 1, 0),
            "generation.previous": lambda: self._to_branch(self.place.generation - 1, 0),
            "layer.next": lambda: self.go(Go(layer=self.place.layer + 1)),
            "layer.previous": lambda: self.go(Go(layer=self.place.layer - 1)),
            "head.next": lambda: self.go(Go(head=self.place.head + 1)),
            "head.previous": lambda: self.go(Go(head=self.place.head - 1)),
            "panel.next": lambda: self.slots.turn(1),
            "panel.previous": lambda: self.slots.turn(-1),
            "panel.choose": self._choose_panel,
            "panel.maximize": lambda: self.slots.maximise(),
            "panel.more": lambda: self.slots.change(1),
            "panel.fewer": lambda: self.slots.change(-1),
            "panel.export": self._export,
            "screen.shot": self._shoot,
            "app.palette": self.app.action_command_palette,
            "app.theme": self.app.search_themes,
            "app.help": self._help,
            "run.stop": self._stop,
            "app.quit": self._quit,
        }
