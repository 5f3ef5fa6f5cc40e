"""Screens without an open trace: the start screen, and the screen of an unreadable trace."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.core.errors import FlexInspectError, TraceError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.job import Job, ScriptJob
from flexinspect.trace.file import salvage
from flexinspect.tui.saved_state import known_traces
from flexinspect.tui.screens.dialogs import ask_text

OpenTarget = Callable[["Path | Job | ScriptJob"], None]
"""Opens a trace or starts a job."""

JobFactory = Callable[[Sequence[str]], Job | ScriptJob]
"""Returns the job of a command line. Raises `FlexInspectError`."""

DEMO = ("run", "--model", "demo", "--dataset", "demo", "--max-samples", "2")


class StartScreen(Screen[None]):
    """Lists what can be run or opened, each with its command line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "app.quit", "quit")]

    def __init__(self, open_target: OpenTarget, make_job: JobFactory) -> None:
        super().__init__()
        self._open_target, self._make_job = open_target, make_job
        self._traces = known_traces()

    def compose(self) -> ComposeResult:
        with Vertical(id="start"):
            yield Static(Content.styled("flexinspect", "bold"), markup=False)
            yield Static("The debugger for FlexAttention generation.\n")
            yield OptionList(*self._options())
        yield Footer(show_command_palette=False)

    def _options(self) -> list[Option]:
        options = [
            _make_option("demo", "Run the demo model", f"flexinspect {shlex.join(DEMO)}"),
            _make_option("model", "Run a model …", "flexinspect run --model NAME --prompt TEXT"),
        ]
        for number, path in enumerate(self._traces):
            command = f"flexinspect open {shlex.quote(str(path))}"
            options.append(
                _make_option(f"trace-{number}", f"Open {path.name}, {_format_age(path)}", command)
            )
        return options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        name = event.option.id or ""
        if name == "demo":
            self._run_command(list(DEMO))
        elif name == "model":
            self._ask_model()
        else:
            self._open_target(self._traces[int(name.rpartition("-")[2])])

    @work
    async def _ask_model(self) -> None:
        question = "Which model? (an alias, a folder, a hub id)"
        model = await ask_text(self.app, question, "demo")
        if not model:
            return
        question = "The question in several wordings, separated by |"
        example = "What is the capital of France? | France's capital city?"
        prompts = await ask_text(self.app, question, placeholder=example)
        if not prompts:
            return
        # With "=", so that nothing that was typed is parsed as a flag.
        pieces = [piece.strip() for piece in prompts.split("|") if piece.strip()]
        self._run_command(["run", f"--model={model}", *(f"--prompt={piece}" for piece in pieces)])

    def _run_command(self, argv: list[str]) -> None:
        try:
            self._open_target(self._make_job(argv))
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error", timeout=15)


def _make_option(name: str, title: str, command: str) -> Option:
    text = Content.assemble(
        (escape_unprintable(title), "bold"), "\n  ", (escape_unprintable(command), "dim"), "\n"
    )
    return Option(text, id=name)


def _format_age(path: Path) -> str:
    try:
        seconds = max(time.time() - path.stat().st_mtime, 0)
    except OSError:
        return "gone"
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} old"
    return "new"


class UnreadableTraceScreen(Screen[None]):
    """Shows what is wrong with a file and which parts are readable, and offers other traces.

    The readable parts are counted, and copied on request, in threads.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "app.quit", "quit")]

    def __init__(self, path: Path, error: TraceError, open_target: OpenTarget) -> None:
        super().__init__()
        self._path, self._error, self._open_target = path, error, open_target
        self._offers_copy = salvage.is_repairable(path)
        self._copy: Path | None = None
        self._is_copying = self._is_closed = False
        this = path.absolute()
        self._others = [other for other in known_traces(this.parent) if other != this]

    def compose(self) -> ComposeResult:
        with Vertical(id="broken"):
            yield Static(Content.styled("This trace cannot be opened", "bold $error"))
            yield Static(Content(f"\n{escape_unprintable(self._error.message)}"), id="why")
            if self._error.hint:
                yield Static(Content(escape_unprintable(self._error.hint)), id="hint")
            yield Static(Content("\nLooking for what can still be read …\n"), id="left")
            yield Static(id="copying")
            if options := self._options():
                yield OptionList(*options)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#copying").display = False
        self._show_readable_parts()

    @work
    async def _show_readable_parts(self) -> None:
        try:
            lines = await asyncio.to_thread(salvage.describe_readable, self._path)
        except Exception:
            lines = ["The readable parts could not be determined."]
        self.query_one("#left", Static).update(Content("\n".join(["", *lines, ""])))

    def _options(self) -> list[Option]:
        options = [
            Option(Content(f"Open {escape_unprintable(str(path))}")) for path in self._others
        ]
        if self._offers_copy:
            options.insert(0, Option(Content("Open what is left of it, as a copy"), id="copy"))
        return options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open a repaired copy, made first if necessary, or another trace."""
        if event.option.id != "copy":
            self._open_target(self._others[event.option_index - self._offers_copy])
        elif not self._is_copying:
            self._open_copy()

    @work
    async def _open_copy(self) -> None:
        if self._copy is None:
            self._is_copying = True
            self._show_message("Copying what is left …\n")
            with suppress(Exception):
                await asyncio.to_thread(self._make_copy)
            self._is_copying = False
        if self._copy is not None:
            self._show_message("")
            self._open_target(self._copy)
        else:
            self._show_message(
                "No copy could be made: is there room in the folder for temporary files?\n"
            )

    def _show_message(self, text: str) -> None:
        message = self.query_one("#copying", Static)
        message.update(Content(text))
        message.display = bool(text)

    def _make_copy(self) -> None:
        """Make the copy, in a thread, and remove it if the screen was closed meanwhile."""
        self._copy = salvage.repair_copy(self._path, lambda: self._is_closed)
        if self._is_closed:
            self._remove_copy()

    def on_unmount(self) -> None:
        """Remove the copy, and cancel one that is being made."""
        self._is_closed = True
        self._remove_copy()

    def _remove_copy(self) -> None:
        if self._copy is not None:
            salvage.delete_repaired_copy(self._copy)
