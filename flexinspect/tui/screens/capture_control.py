"""The screen below the trace screen: pending rules in the background, control of the capture.

The rules that have not checked a trace run in a separate process: in a thread they would compete
with drawing for the GIL. `ControlScreen` pauses, steps, rewinds and edits a running capture, with
the dialogs for its commands.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from textual import work
from textual.reactive import reactive
from textual.screen import Screen

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.trace.queries.range_queries import branch_of_step
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.capture_client import CaptureClient, CaptureStatus
from flexinspect.tui.screens.dialogs import ask_choice, ask_text, call_in_thread
from flexinspect.tui.trace_session import RunStatus, TraceSession

# Rules, messages of control and some dialogs are imported on first use: the first screen does not
# need them, and they would delay it.
if TYPE_CHECKING:
    from flexinspect.analysis.offline_rules import Review
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import (
        CommandResponse,
        MaskEdit,
        RewindCommand,
        RewindState,
        StatusResponse,
    )
    from flexinspect.control.messages import StepRef as LivePlace
    from flexinspect.records.prompt import Segment
    from flexinspect.records.step import Candidate


REVIEW_DELAY_S = 0.3
"""Delay before rules are imported, which would compete with drawing the first screen."""


async def review_in_background(session: TraceSession, pool: Executor) -> str | None:
    """Run the pending rules; return None if there are none, else a note, which may be empty.

    Afterwards the session's reader returns their findings, stored in the trace or not.
    """
    reader = session.reader
    if reader is None:
        return None
    loop = asyncio.get_running_loop()
    if not await loop.run_in_executor(pool, needs_review, reader):
        return None
    result = await _run_review(reader)
    if result.unstored:
        from flexinspect.trace.file.writer import review_statements

        reader.add_reviews(review_statements(result.unstored))
    return result.note


def needs_review(reader: TraceReader) -> bool:
    """Return whether any rule has not checked a part of the trace yet."""
    from flexinspect.analysis.offline_rules import pending_tasks
    from flexinspect.rules.engine import load_rules

    try:
        return bool(pending_tasks(reader, load_rules().rules))
    except FlexInspectError:
        return False  # the panels show what is wrong with the trace


async def _run_review(reader: TraceReader) -> Review:
    from flexinspect.analysis.offline_rules import Review, review_command, review_from_json

    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    command = review_command(reader.path)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=nothing, stdout=pipe, stderr=nothing, start_new_session=True
    )
    try:
        text, _ = await process.communicate()
    finally:
        if process.returncode is None:  # the interface was closed
            with suppress(ProcessLookupError):
                process.kill()
    try:
        return review_from_json(text.decode())
    except ValueError:
        note = "The rules that look at a finished trace failed; see the findings command."
        return Review(0, (), note)


POLL_S = 0.25
"""Interval between status requests to a running capture; each takes a millisecond of a thread."""

NOTIFY_AFTER_S = 0.4
"""If the header shows the effect of a command by then, its message is not shown."""

COMMAND_POLL_S = 0.03
BRANCH_WAIT_S = 3.0
"""How long to wait for a new branch in the trace after the capture has reported it."""

N_THREADS = 2
"""Threads that load what the screen shows."""

T = TypeVar("T")


class ControlScreen(Screen[None]):
    """A place in a trace, and the actions of control. `TraceScreen`, its subclass, navigates."""

    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False)
    following: reactive[bool] = reactive(True, repaint=False)
    capture_status: reactive[CaptureStatus] = reactive(CaptureStatus(), repaint=False, init=False)

    def __init__(self, session: TraceSession) -> None:
        super().__init__()
        self._session, self.capture = session, CaptureClient(session)
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="flexinspect-load")
        self.status = RunStatus()
        self._last_review: tuple[Path | None, int] | None = None
        self._has_shown_pause_hint = False
        self.is_painted = asyncio.Event()
        """Whether the first frame is painted, after which panels and rules are imported."""

    def on_unmount(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def reader(self) -> TraceReader | None:
        """The reader of the trace, None before there is one."""
        return self._session.reader

    def poll_trace(self) -> None:
        """Show what has changed in the trace."""
        raise NotImplementedError

    def navigate(self, target: Navigate) -> None:
        """Go to a place in the trace."""
        raise NotImplementedError

    def follow(self) -> None:
        """Follow the newest step."""
        raise NotImplementedError

    def keys_of(self, name: str) -> str:
        """Return the configured keys of an action."""
        app: Any = self.app
        return str(app.keys_of(name))

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
        elif new.is_unresponsive and not old.is_unresponsive:
            self.notify(
                "The model's process does not answer; a debugger may hold it.", severity="warning"
            )

    def _notify_paused(self, status: StatusResponse) -> None:
        """Notify why the capture has paused; if the user asked for it, only once."""
        from flexinspect.control.messages import PAUSE_REQUESTED

        is_requested = status.reason == PAUSE_REQUESTED
        if is_requested and self._has_shown_pause_hint:
            return
        self._has_shown_pause_hint = True
        keys = f"{self.keys_of('run.pause')} goes on, {self.keys_of('run.step')} steps"
        show_reason = status.reason and not is_requested
        reason = f": {escape_unprintable(status.reason)}" if show_reason else ""
        self.notify(f"{escape_unprintable(status.description)}{reason}. {keys}.")

    def show_debugger_messages(self, messages: deque[str]) -> None:
        """Show and remove messages about debuggers, such as where to attach."""
        while messages:
            self.notify(escape_unprintable(messages.popleft()), timeout=15)

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
        await self.is_painted.wait()
        await asyncio.sleep(REVIEW_DELAY_S)
        message = await review_in_background(self._session, self._pool)
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
        if self.capture_status.state in ("paused", "pausing"):
            self._run_command(lambda client: client.continue_())
        else:
            self._run_command(lambda client: client.pause())

    def step_once(self) -> None:
        """Let the model generate one token, and show it."""
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
    async def restore_step(self) -> None:
        """Restore the state of the model after the current step."""
        from flexinspect.control.messages import Restore

        await self._run_with_cost(Restore(_live_place(self.place)))

    @work(group="dialog")
    async def fork_step(self) -> None:
        """Choose another token for the current step; the model continues from there as a branch."""
        from flexinspect.control.messages import Fork

        there = _live_place(self.place)  # it may follow the model while the user chooses
        token = await ask_token(self.app, self.reader, self.place) if self.reader else None
        if token is not None:
            await self._run_with_cost(Fork(there, token.token_id, token.text))

    @work(group="dialog")
    async def edit_mask(self) -> None:
        """Edit the mask; the model continues from the current step as a branch."""
        from flexinspect.control.messages import EditMask

        there = _live_place(self.place)
        edit = await ask_edit(self.app, self.reader, self.place) if self.reader else None
        if edit is not None:
            await self._run_with_cost(EditMask(there, (edit,)))

    async def _run_with_cost(self, command: RewindCommand) -> None:
        """Run a command, after a question if it is expensive, and go to its result."""
        from msgspec.structs import replace

        trial = replace(command, dry_run=True)
        dry = await self.call_capture(lambda client: client.rewind(trial))
        if dry is None:
            return
        if dry.cost is not None and dry.cost.is_expensive:
            options = [("do", "Do it"), ("leave", "Leave it")]
            if await ask_choice(self.app, escape_unprintable(dry.cost.sentence), options) != "do":
                return
        response = await self.call_capture(lambda client: client.rewind(command))
        if response is None or response.rewind_number is None:
            return
        cost_text = f"; {dry.cost.sentence}" if dry.cost is not None else ""
        self.notify(escape_unprintable(f"{response.message}{cost_text}"))
        await self._show_result(await self._wait_for_command(response.rewind_number))

    async def _wait_for_command(self, number: int) -> RewindState | None:
        """Wait until a command is done, for as long as the model takes."""
        while self.status.live:
            self.capture_status = await asyncio.to_thread(self.capture.poll)
            status = self.capture_status.status
            rewind = status.last_rewind if status is not None else None
            if rewind is not None and rewind.number == number and rewind.state in _FINAL_STATES:
                return rewind
            await asyncio.sleep(COMMAND_POLL_S)
        return None

    async def _show_result(self, rewind: RewindState | None) -> None:
        if rewind is None:
            return
        failed = rewind.state == "failed"
        duration = f" ({1e3 * rewind.seconds:.0f} ms)" if rewind.seconds is not None else ""
        text = escape_unprintable(rewind.message or f"The {rewind.kind} is {rewind.state}.")
        self.notify(text + duration, severity="error" if failed else "information")
        if not failed and rewind.place is not None:
            await self._show_branch(rewind.place)

    async def _show_branch(self, there: LivePlace) -> None:
        """Go to the place that a command led to, once its branch is in the trace."""
        for _ in range(round(BRANCH_WAIT_S / COMMAND_POLL_S)):
            if self.reader is not None and _has_branch(self.reader, there):
                break
            await asyncio.sleep(COMMAND_POLL_S)
        place = self.place
        if there.branch == place.branch and there.generation == place.generation:
            self.navigate(Navigate(step=max(there.step, 0)))
            return
        self.navigate(Navigate(generation=there.generation, branch=there.branch))
        self.follow()

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
        options = [(str(row.branch), format_branch(row, place.branch)) for row in rows]
        answer = await ask_choice(self.app, "Show a branch", options)
        if answer is not None:
            self.navigate(Navigate(generation=place.generation, branch=int(answer)))
            self.navigate(Navigate(step=place.step))


def format_branch(row: Any, current: int) -> str:
    """Return the line of a branch: its number, its fork, its state and answer."""
    mark = "▸" if row.branch == current else " "
    if row.parent is None:
        origin = "the original generation"
    else:
        origin = f"from branch {row.parent} at step {row.fork_step}"
    answer = escape_unprintable(row.answer).strip()
    answer_text = f" · {answer[:40]}" if answer else ""
    return f"{mark} {row.branch}  {origin} · {row.state}{answer_text}"


def _live_place(place: TracePlace) -> LivePlace:
    from flexinspect.control.messages import StepRef as LivePlace

    return LivePlace(place.generation, place.branch, place.step)


def _has_branch(reader: TraceReader, there: LivePlace) -> bool:
    try:
        return any(row.branch == there.branch for row in reader.branches(there.generation))
    except FlexInspectError:
        return False


OTHER = "other"
_FINAL_STATES = ("done", "failed")


class ForcedToken(Struct, frozen=True):
    """The token to force, by its id, or a text of which all tokens are forced."""

    token_id: int | None = None
    text: str | None = None


async def ask_token(app: Any, reader: TraceReader, place: TracePlace) -> ForcedToken | None:
    """Let the user choose a candidate of the step or type a text; None when cancelled."""
    candidates = await call_in_thread(app, lambda: _load_candidates(reader, place))
    if candidates is None:
        return None
    options = [(str(one.token_id), _format_candidate(one)) for one in candidates]
    question = f"Continue from step {place.step} with another token"
    options.append((OTHER, "… type a token or a text"))
    answer = await ask_choice(app, question, options)
    if answer is None:
        return None
    if answer != OTHER:
        return ForcedToken(token_id=int(answer))
    question = "A text, whose tokens are forced in order, or #ID for one token"
    typed = await ask_text(app, question, placeholder=" Paris")
    return parse_forced_token(typed) if typed else None


def parse_forced_token(typed: str) -> ForcedToken:
    """Return the token that was typed: "#123" is a token id, anything else a text."""
    by_id = re.fullmatch(r"\s*#(\d{1,9})\s*", typed)
    return ForcedToken(token_id=int(by_id[1])) if by_id else ForcedToken(text=typed)


def _load_candidates(reader: TraceReader, place: TracePlace) -> list[Candidate]:
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    chosen = reader.logits(place.generation, place.step, branch)
    candidates = reader.candidates(place.generation, place.step, branch)
    return [one for one in candidates if chosen is None or one.token_id != chosen.chosen_id]


def _format_candidate(one: Candidate) -> str:
    from flexinspect.panels.logits_panel import probability, token_label

    return (
        f"{one.rank:>3}  {token_label(one.text, one.token_id):<24} {probability(one.logprob):7.2%}"
    )


EDIT_KINDS = (
    ("preset", "Use another preset"),
    ("drop", "Drop a segment: no other segment attends to it"),
    ("join", "Join two segments: they attend to each other"),
    ("see", "Let a segment attend to another"),
    ("unsee", "Stop a segment from attending to another"),
    ("open-cell", "Open a cell: a position attends to a key"),
    ("close-cell", "Close a cell"),
    ("open-row", "Open a row: a position attends to all keys up to itself"),
    ("close-row", "Close a row: a position attends only to itself"),
)


async def ask_edit(app: Any, reader: TraceReader, place: TracePlace) -> MaskEdit | None:
    """Let the user choose an edit of the mask; None when cancelled."""
    question = f"Continue from step {place.step} with another mask"
    kind = await ask_choice(app, question, EDIT_KINDS)
    if kind is None:
        return None
    if kind == "preset":
        return await _ask_preset(app)
    if kind in ("drop", "join", "see", "unsee"):
        return await _ask_segments(app, kind, reader, place)
    return await _ask_cells(app, kind)


async def _ask_preset(app: Any) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit
    from flexinspect.masks.algebra import PRESETS

    options = [(name, name) for name in PRESETS]
    name = await ask_choice(app, "Which preset?", options)
    return MaskEdit("preset", name=name) if name else None


_QUESTIONS = {
    "drop": ("Which segment is dropped?",),
    "join": ("Which segment …", "… is joined with which one?"),
    "see": ("Which segment …", "… attends to which other one?"),
    "unsee": ("Which segment …", "… no longer attends to which one?"),
}


async def _ask_segments(
    app: Any, kind: str, reader: TraceReader, place: TracePlace
) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    segments = await call_in_thread(app, lambda: reader.segments(place.generation, place.branch))
    if segments is None:
        return None
    chosen: list[int] = []
    for question in _QUESTIONS[kind]:
        answer = await ask_choice(app, question, _segment_options(segments, exclude=chosen))
        if answer is None:
            return None
        chosen.append(int(answer))
    op = "see" if kind == "unsee" else kind
    return MaskEdit(op, segments=tuple(chosen), is_open=kind != "unsee")  # type: ignore[arg-type]


def _segment_options(segments: Sequence[Segment], exclude: Sequence[int]) -> list[tuple[str, str]]:
    return [
        (str(number), f"{number:>2}  {escape_unprintable(one.label)}  [{one.start}, {one.stop})")
        for number, one in enumerate(segments)
        if number not in exclude and one.stop > one.start
    ]


async def _ask_cells(app: Any, kind: str) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    is_cell, is_open = kind.endswith("cell"), kind.startswith("open")
    question = "Row and key, two positions" if is_cell else "Which row, a position"
    typed = await ask_text(app, question, placeholder="42 7" if is_cell else "42")
    numbers = [int(text) for text in re.findall(r"\d{1,9}", typed or "")]
    if len(numbers) != (2 if is_cell else 1):
        if typed:
            what = "row and a key" if is_cell else "row"
            app.notify(f"That is not a {what}.", severity="warning")
        return None
    if is_cell:
        return MaskEdit("cell", row=numbers[0], key=numbers[1], is_open=is_open)
    return MaskEdit("row", row=numbers[0], is_open=is_open)
