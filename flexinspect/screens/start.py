"""The start screen: run the demo, open a trace, run a model; each with its command line."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
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

from flexinspect.errors import FlexInspectError
from flexinspect.job import Job, ScriptJob
from flexinspect.screens.ask import TextDialog
from flexinspect.state import known_traces
from flexinspect.text import escape_unprintable

OpenTarget = Callable[["Path | Job | ScriptJob"], None]
"""Opens a trace or starts a job."""

JobFactory = Callable[[Sequence[str]], Job | ScriptJob]
"""Makes the job of a command line; raises `FlexInspectError`."""

DEMO = ("run", "--model", "demo", "--dataset", "demo", "--max-samples", "2")


class StartScreen(Screen[None]):
    """What can be done, and how it would be typed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "app.quit", "quit")]

    def __init__(self, open_target: OpenTarget, make_job: JobFactory) -> None:
        super().__init__()
        self._open_target, self._make_job = open_target, make_job
        self._traces = known_traces()

    def compose(self) -> ComposeResult:
        """A heading, the list, the footer."""
        with Vertical(id="start"):
            yield Static(Content.styled("flexinspect", "bold"), markup=False)
            yield Static("The debugger for FlexAttention generation: it shows what ran.\n")
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
        """Do it."""
        name = event.option.id or ""
        if name == "demo":
            self._run_command(list(DEMO))
        elif name == "model":
            self._ask_model()
        else:
            self._open_target(self._traces[int(name.rpartition("-")[2])])

    @work
    async def _ask_model(self) -> None:
        model = await self.app.push_screen_wait(
            TextDialog("Which model? (an alias, a folder, a hub id)", "demo")
        )
        if not model:
            return
        question = "The question in several wordings, separated by |"
        prompts = await self.app.push_screen_wait(
            TextDialog(
                question, placeholder="What is the capital of France? | France's capital city?"
            )
        )
        if not prompts:
            return
        # With "=", so that nothing that was typed is taken for a flag.
        pieces = [piece.strip() for piece in prompts.split("|") if piece.strip()]
        self._run_command(["run", f"--model={model}", *(f"--prompt={piece}" for piece in pieces)])

    def _run_command(self, words: list[str]) -> None:
        try:
            self._open_target(self._make_job(words))
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error", markup=False, timeout=15)


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
    return "just made"
