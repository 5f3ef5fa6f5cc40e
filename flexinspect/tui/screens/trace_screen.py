"""The screen of a trace: panels around a current place, live or afterwards.

It controls a running capture, runs the rules that have not checked the trace yet, and saves
pictures of the whole screen and of one panel.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from msgspec.structs import replace
from textual import events, on, work
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen
from textual.timer import Timer

from flexinspect.analysis.reports import collect
from flexinspect.core.conversion import parse_step_number
from flexinspect.core.environment import replace_file
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import all_keys
from flexinspect.core.text import capitalize, escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.findings_panel import (
    evidence_panel,
    load_summary,
    navigate_to_finding,
    next_finding,
    read_paragraphs,
)
from flexinspect.panels.panel_registry import option_names, panel_names
from flexinspect.panels.token_window import current_pos
from flexinspect.panels.xray import DIRECTIONS, Direction
from flexinspect.records.finding import Finding
from flexinspect.trace.queries import branch_of_step, find_text, read_tokens
from flexinspect.trace.query_results import FindingRow
from flexinspect.trace.reader import TraceReader
from flexinspect.tui import trace_session
from flexinspect.tui.diagnosis_card import DiagnosisCard
from flexinspect.tui.key_line import KeyLine, actions_to_show
from flexinspect.tui.panel_layout import Slots, format_panel_option
from flexinspect.tui.panel_view import LoadedCanvas, PanelView, theme_of
from flexinspect.tui.screens import dialogs
from flexinspect.tui.screens.dialogs import ask_choice, ask_text, call_in_thread
from flexinspect.tui.screens.text_screen import TextScreen
from flexinspect.tui.status_lines import StatusBanner, TokenStrip, TraceHeader
from flexinspect.tui.step_timeline import StepTimeline
from flexinspect.tui.trace_session import CaptureClient, CaptureStatus, RunStatus, TraceSession

# Messages of control and some dialogs are imported on first use: the first screen does not need
# them, and they would delay it.
if TYPE_CHECKING:
    from textual.command import Provider

    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import (
        CommandResponse,
        RewindCommand,
        RewindKind,
        RewindState,
        StatusResponse,
        StepRef,
    )

T = TypeVar("T")


def parse_step(text: str, first: int, last: int) -> int | None:
    """Return the step that was typed: a number, `first`, `last` or `prefill`; None for a word."""
    names = {"first": first, "last": last, "prefill": 0}
    return names.get(text.strip().lower(), parse_step_number(text))


def find_token(
    reader: TraceReader,
    place: TracePlace,
    text: str,
    *,
    only_generated: bool,
    is_next: bool = False,
) -> Navigate | None:
    """Return the next token after a place at which `text` begins.

    It is searched in the whole branch of the place, then in the other generations. The next match
    (`is_next`) is searched in reading order instead: to the end of the branch, in the generations
    that follow, and at last in the beginning of the branch. A token of the prompt belongs to step 0
    and is selected by its position.
    """
    current = current_pos(reader, place)
    numbers = [row.generation for row in reader.generations()]
    others = [number for number in numbers if number > place.generation]
    others += [number for number in numbers if number < place.generation]
    here = (place.generation, place.branch)
    parts = [(*here, -1 if current is None else current)]
    parts += [] if is_next else [(*here, -1)]
    parts += [(number, 0, -1) for number in others]
    parts += [(*here, -1)] if is_next else []
    for generation, branch, after in parts:
        match = find_text(
            *(reader, text, generation, branch), after=after, only_generated=only_generated
        )
        if match is not None:
            pos, step = match
            at = (generation, branch, step or 0)
            return Navigate(*at, pos=pos if step is None else None)
    return None


def clamp_place(place: TracePlace, status: RunStatus) -> TracePlace:
    """Return the nearest place that the trace has: its step, layer and head."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    last = status.last_step
    step = max(place.step, 0) if last is None else min(max(place.step, status.first_step), last)
    return replace(
        place,
        step=step,
        layer=_clamp_index(place.layer, model.get("layers")),
        head=_clamp_index(place.head, model.get("heads")),
    )


def extrapolate_place(old: TracePlace, new: TracePlace) -> TracePlace | None:
    """Return the place after `new` if the user keeps moving as from `old`; None if unknown."""
    if (old.generation, old.branch) != (new.generation, new.branch):
        return None
    return replace(
        new,
        step=2 * new.step - old.step,
        layer=2 * new.layer - old.layer,
        head=2 * new.head - old.head,
    )


def _clamp_index(value: int, count: object) -> int:
    return max(0, min(value, count - 1)) if isinstance(count, int) and count > 0 else max(value, 0)


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
    from flexinspect.tui.screens.commands import KeyCommands

    return KeyCommands


def save_screen(app: Any, path: Path) -> Path | None:
    """Save the screen as SVG, or deliver it to the browser. Raises `FlexInspectError`."""
    if app.is_web:
        app.deliver_screenshot(path.name)
        return None
    from flexinspect.drawing.export import save

    # The compositor has the strips that are on the screen. Textual's own SVG relies on
    # `textLength`, without which other renderers than browsers shift the text.
    save(path, app.screen._compositor.render_strips(), title=path.stem, theme=theme_of(app))
    return path


def free_file(file: Path) -> Path:
    """Return the file, or a name with the first number that is not taken."""
    names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    return file if not file.exists() else next(name for name in names if not name.exists())


FRAME_S = 0.03
"""How long a frame waits for slow panels.

Textual paints 60 times per second at fixed times; a frame painted in two parts takes two of them.
"""
N_LOOP_ITERATIONS = 5
"""Iterations of the event loop until the screen knows of everything painted.

A widget posts a message to itself, then to the screen, and each message is handled in its own
iteration. More iterations do no harm.
"""

POLL_EVERY_S = 0.05
PAGE = 10
MAX_PLACES = 100
"""How many jumps can be undone."""

POLL_S = 0.25
"""Interval between status requests to a running capture; each takes a millisecond of a thread."""

NOTIFY_AFTER_S = 0.4
"""If the header shows the effect of a command by then, its message is not shown."""

COMMAND_POLL_S = 0.03
BRANCH_WAIT_S = 3.0
"""How long to wait for a new branch in the trace after the capture has reported it."""

NEED_MODEL = (
    *("run.pause", "run.step", "run.breakpoints"),
    *("travel.restore", "travel.fork", "travel.mask"),
)
"""Actions that say at once if the run has ended, before they ask or move anything."""

REPLAY_S = 0.3
"""Interval between the steps of a replay."""

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
    cell: tuple[int, int] | None = None
    """The positions of the row and key that are selected in the mask, None before a selection."""

    def __init__(
        self, session: TraceSession, place: TracePlace | None = None, *, has_tour: bool = False
    ) -> None:
        super().__init__()
        self._has_tour = has_tour
        self._session, self.capture = session, CaptureClient(session)
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="flexinspect-load")
        self.status = RunStatus()
        self._last_review: tuple[Path | None, int] | None = None
        self._has_shown_pause_hint = False
        self._initial_place = place
        self._finding: FindingRow | None = None
        self._search = self._last_error = ""
        self._is_frame_open = False
        self._next_place: TracePlace | None = None
        self._forked: int | None = None
        """The branch that is followed to its end only."""
        self._places: list[TracePlace] = []
        self._replay_timer: Timer | None = None
        if place is not None:
            self.set_reactive(TraceScreen.place, place)
            self.set_reactive(TraceScreen.following, False)

    def compose(self) -> ComposeResult:
        yield TraceHeader(self._session, self._pool)
        yield TokenStrip(self._session, self._pool)
        yield StepTimeline(self._session, self._pool)
        yield StatusBanner()
        yield DiagnosisCard(self._session, self._pool)
        yield Slots(self._session, self._pool, has_tour=self._has_tour)
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
        for name in ("capture_status", "following", "version"):
            self.watch(self, name, self._show_keys, init=False)

    def on_resize(self, event: events.Resize) -> None:
        """Give the card the lines that the panels can spare."""
        self.query_one(DiagnosisCard).fit_screen(event.size.height)
        self.query_one(StepTimeline).fit_screen(event.size.height)

    @on(events.DescendantFocus)
    @on(Slots.Changed)
    def _handle_panel_change(self) -> None:
        """Show the keys of the focused panel, the X-ray and the cell in one that has appeared."""
        self._show_keys()
        self._select_cell()
        if self.xray != "off":
            self._share_xray()

    def _show_keys(self) -> None:
        for key_line in self.query(KeyLine):
            key_line.repaint()

    def _list_actions(self) -> Iterator[str]:
        panel = self.slots.current().panel
        return actions_to_show(self.status, self.capture_status, panel, following=self.following)

    def on_unmount(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A load that still runs may open the trace again, so it is closed after the last of them.
        threading.Thread(target=self._close_after_loads, name="flexinspect-close").start()

    def _close_after_loads(self) -> None:
        self._pool.shutdown(wait=True)
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
        self.query_one(StatusBanner).show_status(status)
        messages = self._session.debugger_messages
        while messages:  # such as where to attach
            self.notify(escape_unprintable(messages.popleft()), timeout=15)
        if self.following and moved_on and self._forked == self.place.branch:
            self._stay_in_fork()
        elif self.following and moved_on and (status.live or self.version):
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
            self.review_once()
        elif self.capture_status.state == "holding":
            self.review_once(status.generations)

    def _stay_in_fork(self) -> None:
        """Stop following at the end of a fork, so that its answer stays on the screen."""
        self.following, self._forked = False, None
        follow, compare = self.keys_of("step.follow"), self.keys_of("branch.compare")
        self.notify(
            f"Branch {self.place.branch} is finished, and the run continues with the next answer. "
            f"{follow} follows it, {compare} compares this branch with its parent."
        )

    def _start_at(self, place: TracePlace) -> None:
        """Go to the requested place, or to the nearest one in the trace."""
        self.set_reactive(TraceScreen.following, False)
        newest = max(self.status.generations - 1, 0)
        if place.generation > newest:
            message = f"There is no generation {place.generation}; the last one is {newest}."
            self.notify(message, severity="warning")
            self._initial_place = replace(place, generation=newest)
            self.set_reactive(TraceScreen.place, self._initial_place)
            self.poll_trace()
        else:
            self.place = place

    def validate_place(self, place: TracePlace) -> TracePlace:
        return clamp_place(place, self.status)

    def watch_place(self, old: TracePlace, new: TracePlace) -> None:
        """Show the new place in one frame instead of panel by panel."""
        self._next_place = None if self.status.live else extrapolate_place(old, new)
        if self.is_mounted and not self._is_frame_open:
            self._is_frame_open = True
            batch = self.app.batch_update()
            batch.__enter__()
            self._finish_frame(batch)

    @work(group="frame")
    async def _finish_frame(self, batch: AbstractContextManager[None]) -> None:
        """Paint when all is loaded, or after `FRAME_S`."""
        try:
            async with asyncio.timeout(FRAME_S):
                for canvas in self._shown_canvases():
                    await canvas.loader.wait_idle()
                for _ in range(N_LOOP_ITERATIONS):
                    await asyncio.sleep(0)
        except TimeoutError:
            pass  # late results are painted when they arrive
        else:
            self.call_after_refresh(self._preload_next)
        finally:
            batch.__exit__(None, None, None)
            self._is_frame_open = False

    def _preload_next(self) -> None:
        """Load in advance the place that the same key would go to next."""
        if self._next_place is None:
            return
        place = self.validate_place(self._next_place)
        if place != self.place:
            for canvas in self._shown_canvases():
                canvas.preload(place)

    def _shown_canvases(self) -> list[LoadedCanvas]:
        kinds = (TraceHeader, TokenStrip, StepTimeline, DiagnosisCard)
        return [*(self.query_one(kind) for kind in kinds), *self.slots.views()]

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
            self.slots.focus_panel(target.panel)

    def _jump(self, target: Navigate) -> None:
        """Go to a place from which `place.back` returns."""
        before = self.place
        self.navigate(target)
        if self.place != before:
            self._places = [*self._places[1 - MAX_PLACES :], before]

    def _go_back(self) -> None:
        """Return to the place before the last jump."""
        if not self._places:
            self.notify("There was no jump yet.")
            return
        place = self._places.pop()
        self._go_to_branch(place.generation, place.branch)
        self.following, self.place = False, place

    def _move_by(self, n: int) -> None:
        self.navigate(Navigate(step=self.place.step + n))

    def _move_pos(self, by: int) -> None:
        """Go to the next or the previous token of the text."""
        reader, place = self.reader, self.place
        if reader is None or (pos := current_pos(reader, place)) is None:
            return
        tokens = read_tokens(reader, place.generation, place.branch, pos + by, pos + by + 1)
        for token in tokens:
            step = token.step
            self.navigate(Navigate(step=step or 0, pos=token.pos if step is None else None))

    def _replay(self) -> None:
        """Show one step after the other until the last one; the second time, stop."""
        if self._replay_timer is not None:
            self._replay_timer.stop()
            self._replay_timer = None
            return
        if self.place.step == self.status.last_step:
            self.navigate(Navigate(step=self.status.first_step))
        self._replay_timer = self.set_interval(REPLAY_S, self._replay_step)

    def _replay_step(self) -> None:
        if self.place.step == self.status.last_step and self._replay_timer is not None:
            self._replay()  # which stops
        else:
            self._move_by(1)

    def _next_xray(self) -> None:
        """Show what the token sees, then what sees it, then neither, in the strip and the panel."""
        self.xray = DIRECTIONS[(DIRECTIONS.index(self.xray) + 1) % len(DIRECTIONS)]
        self._share_xray()

    def _share_xray(self) -> None:
        for view in self.slots.views():
            if view.panel.name == "tokens":
                view.change_options(replace(view.options, xray=self.xray))

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
        self.slots.ensure_loaded()  # a key typed ahead of the first frame acts on the real panels
        action = self._key_actions().get(name)
        if name in NEED_MODEL and not self.status.live:
            self.notify(self._session.missing_model().sentence(), severity="warning")
        elif action is not None:
            try:
                action()
            except FlexInspectError as error:
                self.show_error(error)
        elif name.startswith("panel.show-"):
            number = int(name.rpartition("-")[2])
            if number <= len(panel_names()):
                self.slots.show_panel(panel_names()[number - 1])
        elif name.startswith("layout."):
            self.slots.apply_layout(name.partition(".")[2])
        else:
            self.slots.handle_action(name)
        if self._has_tour:
            from flexinspect.tui.guided_tour import TourLine

            self.query_one(TourLine).note_action(name)

    def follow(self) -> None:
        """Follow the newest step."""
        self.following, self._forked = True, None
        newest = self.status.generations - 1
        if self.status.live and newest > self.place.generation:
            self.place = TracePlace(newest, layer=self.place.layer, head=self.place.head)
            self.poll_trace()
        if self.status.last_step is not None:
            self.place = replace(self.place, step=self.status.last_step, pos=None)

    def _go_to_finding(self, direction: Literal[1, -1]) -> None:
        """Go to the next finding, wrapping around; findings at one place are visited in turn.

        The first one is the worst, which the card shows.
        """
        source = self._session.source
        if source is None:
            return
        row = load_summary(source, self.place).row if self._finding is None else None
        row = row or next_finding(source.reader, self.place, direction, self._finding)
        if row is None:
            self.notify("There is no finding in this trace.")
            return
        self._finding = row
        self._show_finding(row.finding)

    def _show_finding(self, finding: Finding) -> None:
        """Go to the place of a finding, with the panel that shows the evidence."""
        self._jump(navigate_to_finding(finding))
        self.slots.bring_panel(evidence_panel(finding))
        self.query_one(DiagnosisCard).show_finding(finding)

    @on(DiagnosisCard.Opened)
    @work(group="dialog")
    async def read_finding(self) -> None:
        """Show all of the card's finding; the keys of the next one go on from there."""
        keys = {"n": "1", "N": "-1"}
        if self.query_one(DiagnosisCard).finding is None:  # typed ahead of the first frame
            self.query_one(DiagnosisCard).loader.request_load()
            await self.query_one(DiagnosisCard).loader.wait_idle()
        while (finding := self.query_one(DiagnosisCard).finding) is not None:
            reader = self.reader
            texts = collect.read_position_texts(reader, finding) if reader is not None else ()
            title = f"{capitalize(finding.severity)}: {finding.id}"
            window = TextScreen(title, read_paragraphs(finding, texts), keys)
            answer = await self.app.push_screen_wait(window)
            if answer is None:
                return
            self._go_to_finding(1 if answer == "1" else -1)
            await self.query_one(DiagnosisCard).loader.wait_idle()
        self.notify("There is no finding at this place.")

    def _show_messages(self) -> None:
        app: Any = self.app
        self.app.push_screen(TextScreen("Messages, the newest first", app.messages()))

    def show_error(self, error: FlexInspectError) -> None:
        """Show an error, unless it is the same as the last one."""
        if self._last_error != error.message:
            self._last_error = error.message
            self.notify(error.sentence(), severity="error", timeout=20)

    @work
    async def ask_step(self) -> None:
        """Ask for a step by its number, its name, or a word of its token."""
        first, last = self.status.first_step, self.status.last_step or 0
        question = f"Go to a step ({first} to {last}), or to the next token that contains"
        example = "12, first, last, prefill, or a word"
        answer = await ask_text(self.app, question, placeholder=example)
        if not answer:
            return
        step = parse_step(answer, first, last)
        if step is None:
            self._go_to_match(answer, only_generated=True)
            return
        self._jump(Navigate(step=step))
        if self.place.step != step:
            message = f"Step {step} does not exist; the nearest step is shown."
            self.notify(message, severity="warning")

    @work
    async def ask_search(self) -> None:
        """Ask for a text, and go to the next token that contains it."""
        question = "Search the tokens (* goes to the next match)"
        answer = await ask_text(self.app, question, self._search)
        if answer:
            self._search = answer
            self._go_to_match(answer)

    def next_match(self) -> None:
        """Go to the next match of the search."""
        if self._search:
            self._go_to_match(self._search, is_next=True)
        else:
            self.ask_search()

    def _go_to_match(
        self, text: str, *, only_generated: bool = False, is_next: bool = False
    ) -> None:
        """Go to the next token at which the text begins; see `find_token`."""
        reader = self.reader
        if reader is None:
            return
        try:
            options = {"only_generated": only_generated, "is_next": is_next}
            target = find_token(reader, self.place, text, **options)
        except FlexInspectError as error:
            self.show_error(error)
            return
        if target is None:
            where = "generated text" if only_generated else "text"
            message = f"No {where} contains “{escape_unprintable(text)}”."
            self.notify(message, severity="warning")
        else:
            self._jump(target)

    @work
    async def _choose_panel(self) -> None:
        options = [(name, format_panel_option(name)) for name in panel_names()]
        answer = await ask_choice(self.app, "Show here", options)
        if answer:
            self.slots.show_panel(answer)

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

    @on(LoadedCanvas.NavigationRequest)
    def _handle_navigation(self, event: LoadedCanvas.NavigationRequest) -> None:
        self._jump(event.target)

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
            self._notify_paused(status)
        if new.debugger_stop and new.debugger_stop != old.debugger_stop:
            self.notify(escape_unprintable(new.debugger_stop), severity="warning")
        if new.state == "holding" and self.status.live:
            self.review_once(self.status.generations)

    def _notify_paused(self, status: StatusResponse) -> None:
        """Notify why the capture has paused; if the user asked for it, only once."""
        from flexinspect.control.messages import PAUSE_REQUESTED

        is_requested = status.reason == PAUSE_REQUESTED
        if is_requested and self._has_shown_pause_hint:
            return
        self._has_shown_pause_hint = True
        keys = f"{self.keys_of('run.pause')} continues, {self.keys_of('run.step')} runs one step"
        show_reason = status.reason and not is_requested
        reason = f": {escape_unprintable(status.reason)}" if show_reason else ""
        self.notify(f"{escape_unprintable(status.description)}{reason}. {keys}.")

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

    # -- commands --------------------------------------------------------------------------------

    async def call_capture(self, command: Callable[[ControlClient], T]) -> T | None:
        """Run a command in a thread; show an error of it and return None."""
        return await call_in_thread(self.app, lambda: self.capture.call(command))

    @work(group="command")
    async def _run_command(self, command: Callable[[ControlClient], CommandResponse]) -> None:
        response = await self.call_capture(command)
        if response is not None:
            self.capture_status = CaptureStatus(response.status)
            if response.status.until:
                await asyncio.sleep(NOTIFY_AFTER_S)
            # The header shows a pause that the command has led to.
            if not (response.status.until and self.capture_status.state == "paused"):
                self.notify(f"{escape_unprintable(response.message)}.")

    def toggle_pause(self) -> None:
        """Pause after this step, or continue."""
        is_paused = self.capture_status.state in ("paused", "pausing")
        self._run_command(lambda client: client.continue_() if is_paused else client.pause())

    def step_once(self) -> None:
        """Let the model generate one token, and show it."""
        if not self.following:
            self.follow()
        self._run_command(lambda client: client.step(1))

    @work(group="dialog")
    async def edit_breakpoints(self) -> None:
        """List, set and remove breakpoints."""
        from flexinspect.tui.screens.breakpoints_screen import BreakpointsScreen

        breakpoints = await self.call_capture(lambda client: client.breakpoints())
        if breakpoints is not None:
            await self.app.push_screen_wait(BreakpointsScreen(self.capture, breakpoints))

    # -- rewind ----------------------------------------------------------------------------------

    @work(group="dialog")
    async def rewind(self, kind: RewindKind) -> None:
        """Restore the model to the current step, or fork there with another token or mask."""
        from flexinspect.control.messages import Restore, StepRef

        place, reader = self.place, self.reader  # it may follow the model while the user chooses
        if self.status.last_step is None:
            self.notify("No token is generated yet.")
            return
        there = StepRef(place.generation, place.branch, place.step)
        command: RewindCommand | None = Restore(there) if kind == "restore" else None
        if command is None and reader is not None:
            ask = dialogs.ask_fork if kind == "fork" else dialogs.ask_edit
            command = await ask(self.app, reader, there)
        if command is not None:
            await self._run_with_cost(command)

    async def _run_with_cost(self, command: RewindCommand) -> None:
        """Run a command, after a question if it is expensive, and go to its result."""
        trial = replace(command, dry_run=True)
        dry = await self.call_capture(lambda client: client.rewind(trial))
        if dry is None:
            return
        if dry.cost is not None and dry.cost.is_expensive:
            options = [("do", "Re-run"), ("cancel", "Cancel")]
            question = f"Re-run from here? {escape_unprintable(capitalize(dry.cost.sentence))}"
            if await ask_choice(self.app, question, options) != "do":
                return
        response = await self.call_capture(lambda client: client.rewind(command))
        if response is None or response.rewind_number is None:
            return
        cost_text = f"; {dry.cost.sentence}" if dry.cost is not None else ""
        self.notify(escape_unprintable(f"{response.message}{cost_text}"))
        rewind = await self._wait_for_rewind(response.rewind_number)
        if rewind is None:
            return
        failed = rewind.state == "failed"
        duration = f" ({1e3 * rewind.seconds:.0f} ms)" if rewind.seconds is not None else ""
        text = escape_unprintable(rewind.message or f"The {rewind.kind} is {rewind.state}.")
        self.notify(text + duration, severity="error" if failed else "information")
        if not failed and rewind.place is not None:
            await self._show_branch(rewind.place)

    async def _wait_for_rewind(self, number: int) -> RewindState | None:
        """Wait until a command is done, for as long as the model takes."""
        while self.status.live:
            self.capture_status = await asyncio.to_thread(self.capture.poll)
            status = self.capture_status.status
            rewind = status.last_rewind if status is not None else None
            if rewind and rewind.number == number and rewind.state in ("done", "failed"):
                return rewind
            await asyncio.sleep(COMMAND_POLL_S)
        return None

    async def _show_branch(self, there: StepRef) -> None:
        """Go to the place that a command led to, once its branch is in the trace."""
        for _ in range(round(BRANCH_WAIT_S / COMMAND_POLL_S)):
            with suppress(FlexInspectError):
                rows = self.reader.branches(there.generation) if self.reader is not None else ()
                if any(row.branch == there.branch for row in rows):
                    break
            await asyncio.sleep(COMMAND_POLL_S)
        if (there.generation, there.branch) == (self.place.generation, self.place.branch):
            self.navigate(Navigate(step=max(there.step, 0)))
        else:
            self.navigate(Navigate(generation=there.generation, branch=there.branch))
            self.follow()
            self._forked = there.branch

    # -- branches --------------------------------------------------------------------------------

    @work(group="dialog")
    async def choose_branch(self) -> None:
        """Choose a branch of the generation."""
        reader, place = self.reader, self.place
        if reader is None:
            return
        rows = await call_in_thread(self.app, lambda: reader.branches(place.generation))
        if not rows or len(rows) < 2:
            fork = self.keys_of("travel.fork")
            self.notify(f"This generation has one branch; {fork} forks it.")
            return
        options = [(str(row.branch), dialogs.format_branch(row, place.branch)) for row in rows]
        answer = await ask_choice(self.app, "Show a branch", options)
        if answer is not None:
            self.navigate(Navigate(generation=place.generation, branch=int(answer)))
            self.navigate(Navigate(step=place.step))

    def compare_branch(self) -> None:
        """Show the branch, or the last fork of it, side by side with its parent."""
        source, place = self._session.source, self.place
        if source is None:
            return
        rows = source.reader.branches(place.generation)
        own = [row for row in rows if row.parent is not None and row.branch == place.branch]
        forks = own or [row for row in rows if row.parent == place.branch]
        if not forks:
            fork = self.keys_of("travel.fork")
            self.notify(f"There is no fork to compare with; {fork} tries another token.")
            return
        from flexinspect.tui.pair_data import Side
        from flexinspect.tui.screens.compare_screen import CompareScreen

        row = forks[-1]
        sides = (
            Side(source, row.parent or 0, f"branch {row.parent}"),
            Side(source, row.branch, f"branch {row.branch}"),
        )
        verdict = f"Branch {row.branch} and branch {row.parent}, of which it is a fork"
        there = replace(place, step=row.fork_step or 0, pos=None)
        self.app.push_screen(CompareScreen(sides, verdict, there))

    # -- declarations ----------------------------------------------------------------------------

    @work(group="dialog")
    async def declare(self) -> None:
        """Write the segments that nobody declared to a file, with the borders the user chooses."""
        from flexinspect.analysis import inferred_declaration as inferred

        reader, generation = self.reader, self.place.generation
        if reader is None:
            return
        mask = await call_in_thread(self.app, lambda: inferred.UndeclaredMask(reader, generation))
        if mask is None:
            return
        declaration = await dialogs.ask_declaration(self.app, mask)
        if declaration is None:
            return
        trace = reader.path
        file = free_file(Path.cwd() / f"{trace.stem}.toml")
        try:
            replace_file(file, declaration.toml(trace.name).encode())
        except OSError as error:
            self.notify(f"{file} was not saved: {error.strerror or error}.", severity="error")
        else:
            self.notify(f"Saved {file}. The next run: flexinspect run --declare {file.name} …")

    # -- code ------------------------------------------------------------------------------------

    def open_code(self) -> None:
        """Open the mask_mod of the place's layer in the user's editor. Raises `UsageError`."""
        from flexinspect.launch.editor import editor_command

        source = self._find_mask_mod_source()
        name, _, line = (source or "").rpartition(":")
        if source is None or not line.isdecimal():
            self.notify(f"No mask_mod of layer {self.place.layer} is recorded at this step.")
            return
        file = Path(name)
        if not file.exists():
            message = f"{escape_unprintable(source)} does not exist on this machine."
            self.notify(message, severity="warning")
            return
        command = editor_command(file, int(line), os.environ)
        try:
            if command.needs_terminal:
                with self.app.suspend():
                    subprocess.run(command.arguments, check=False)
            else:
                subprocess.Popen(command.arguments, stdin=subprocess.DEVNULL)
        except (OSError, SuspendNotSupported) as error:
            editor = escape_unprintable(command.arguments[0])
            reason = getattr(error, "strerror", None) or "this terminal cannot be suspended"
            self.notify(f"{editor} could not be started: {reason}.", severity="error")

    def _show_code(self) -> None:
        """Show the code of the mask with the values of the selected cell."""
        self.slots.bring_panel("code")
        self.slots.focus_panel("code")

    def _find_mask_mod_source(self) -> str | None:
        """Return file and line of the mask_mod of the place's layer, None where none is known."""
        reader, place = self.reader, self.place
        if reader is None:
            return None
        owner = branch_of_step(reader, place.generation, place.step, place.branch)
        calls = reader.calls(place.generation, place.step, owner)
        names = [call.mask for call in calls if call.layer == place.layer and call.mask]
        mask = reader.mask_summary(names[0]) if names else None
        return mask.mask_mod_source if mask is not None else None

    # -- pictures, help, quitting -----------------------------------------------------------------

    def _save_picture(self, name: str, save: Callable[[Path], Path | None]) -> None:
        """Save a picture in the current folder and notify the user.

        Its file is named after the trace, `name`, the place and the time of day.
        """
        trace, place = self._session.path, self.place
        where = f"g{place.generation}-s{place.step}-{time.strftime('%H%M%S')}"
        file = Path.cwd() / f"{trace.stem if trace else 'flexinspect'}-{name}-{where}.svg"
        try:
            path = save(file)
            self.notify(f"Saved {path}" if path else "Saved by the browser")
        except FlexInspectError as error:
            self.show_error(error)
        except OSError as error:
            self.notify(f"{file} was not saved: {error.strerror or error}.", severity="error")

    def _save_panel(self) -> None:
        from flexinspect.drawing.export import save

        view = self.slots.current()

        def save_view(path: Path) -> Path:
            save(path, list(view.strips), title=view.panel.title, theme=theme_of(self.app))
            return path

        self._save_picture(view.panel.name, save_view)

    def _help(self) -> None:
        from flexinspect.tui.screens.commands import help_rows

        panel = self.slots.current().panel
        rows = help_rows(self.keys_of, panel.title, panel.actions)
        self.app.push_screen(dialogs.HelpScreen(panel.title, panel.help, rows))

    def _show_glossary(self) -> None:
        from flexinspect.tui.screens.glossary_screen import GlossaryScreen

        self.app.push_screen(GlossaryScreen())

    def _stop(self) -> None:
        """Ask the run to end after this step; the second time, kill it."""
        process, is_live = self._session.process, self.status.live
        if process is None and is_live and self.capture_status.status is not None:
            self._run_command(lambda client: client.stop())
        elif process is None or not is_live:
            self.notify(f"Nothing is running; {self.keys_of('app.quit')} quits.")
        elif self._session.is_stopping:
            process.kill()
        else:
            self._session.interrupt()
            self.notify("Stopping after this step; press again to end the run immediately.")

    @work
    async def _quit(self) -> None:
        if self._session.process is not None and self.status.live:
            answer = await self._ask_about_run()
            if answer == "end":
                self._session.is_ending = True
            elif answer == "stop":
                self._session.interrupt()
            elif answer != "leave":
                return
            elif not self._session.detach():
                self.notify("This run cannot continue without the interface.", severity="warning")
                return
        self.app.exit()

    async def _ask_about_run(self) -> str | None:
        """Ask whether the run stops or continues; one that only holds its model is ended."""
        if self.capture_status.state == "holding":
            return "end" if await self.call_capture(lambda client: client.stop()) else "stop"
        options = [
            ("stop", "Stop the run after this step and quit; the trace stays valid"),
            ("stay", "Continue"),
            ("leave", "Quit, and let the run continue by itself"),
        ]
        return await ask_choice(self.app, "The model is still running.", options)

    def _key_actions(self) -> dict[str, Callable[[], object]]:
        """Return the actions of the table by their ids, without those of panels."""
        return {
            "run.pause": self.toggle_pause,
            "run.step": self.step_once,
            "run.breakpoints": self.edit_breakpoints,
            "travel.restore": lambda: self.rewind("restore"),
            "travel.fork": lambda: self.rewind("fork"),
            "travel.mask": lambda: self.rewind("edit"),
            "branch.choose": self.choose_branch,
            "branch.compare": self.compare_branch,
            "code.open": self.open_code,
            "code.show": self._show_code,
            "step.next": lambda: self._move_by(1),
            "step.previous": lambda: self._move_by(-1),
            "step.forward": lambda: self._move_by(PAGE),
            "step.back": lambda: self._move_by(-PAGE),
            "step.first": lambda: self._jump(Navigate(step=self.status.first_step)),
            "step.last": lambda: self._jump(Navigate(step=self.status.last_step or 0)),
            "step.goto": self.ask_step,
            "step.follow": self.follow,
            "step.replay": self._replay,
            "tokens.search": self.ask_search,
            "tokens.match": self.next_match,
            "tokens.next": lambda: self._move_pos(1),
            "tokens.previous": lambda: self._move_pos(-1),
            "tokens.xray": self._next_xray,
            "finding.next": lambda: self._go_to_finding(1),
            "finding.previous": lambda: self._go_to_finding(-1),
            "finding.read": self.read_finding,
            "place.back": self._go_back,
            "mask.declare": self.declare,
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
            "panel.reset": lambda: self.slots.reset(),
            "panel.export": self._save_panel,
            "screen.shot": lambda: self._save_picture("screen", partial(save_screen, self.app)),
            "app.palette": self.app.action_command_palette,
            "app.theme": self.app.search_themes,
            "app.help": self._help,
            "app.messages": self._show_messages,
            "app.glossary": self._show_glossary,
            "run.stop": self._stop,
            "app.quit": self._quit,
        }
