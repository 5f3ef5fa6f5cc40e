"""An exhibit of the museum: its question, while its trace is built, and the answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from flexinspect.analysis.broken_run_check import build_exhibit
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.inputs.broken_run_catalog import (
    BROKEN_RUNS,
    BrokenRun,
    exhibit_path,
    find_broken_run,
)
from flexinspect.panels.panel_registry import panel_number
from flexinspect.tui.saved_state import add_solved_exhibit
from flexinspect.tui.screens.dialogs import ask_choice


class ExhibitScreen(ModalScreen[Path | None]):
    """Builds a broken run and returns its trace; None if the user cancels with Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("enter", "open", "open"),
    ]

    def __init__(self, run: BrokenRun) -> None:
        super().__init__()
        self._run = run
        self._trace: Path | None = None
        self._is_closed = False

    def compose(self) -> ComposeResult:
        title, *paragraphs = self._run.tutorial_lines()
        with VerticalScroll(classes="window help"):
            yield Static(Content.styled(title, "bold"), classes="helpline")
            for text in paragraphs:
                yield Static(Content(text), classes="helpline")
            yield Static(id="stage")

    def on_mount(self) -> None:
        self._build()

    def on_unmount(self) -> None:
        self._is_closed = True

    @work
    async def _build(self) -> None:
        try:
            self._trace = await asyncio.to_thread(self._build_in_thread)
        except FlexInspectError as error:
            self._show_stage(escape_unprintable(error.sentence()))
        else:
            self._show_stage("Enter opens it · Escape goes back")

    def _build_in_thread(self) -> Path:
        path = exhibit_path(self._run)
        build_exhibit(self._run, path, self._report_stage)
        return path

    def _report_stage(self, stage: str) -> None:
        if self._is_closed:
            raise FlexInspectError("The interface was closed.")  # this ends the build
        self.app.call_from_thread(self._show_stage, f"Building it: {stage} …")

    def _show_stage(self, text: str) -> None:
        self.query_one("#stage", Static).update(Content.styled(text, "$text-accent"))

    def action_open(self) -> None:
        """Open the trace, once it is built."""
        if self._trace is not None:
            self.dismiss(self._trace)


# -- the answer -----------------------------------------------------------------------------------

N_CHOICES = 4


def fault_of(run: BrokenRun) -> str:
    """Return the fault of an exhibit in a few words."""
    from flexinspect.rules.engine import finding_kinds  # only exhibits need it

    return finding_kinds(run.expected[0])[run.expected[0]].meaning


def faults_to_choose(run: BrokenRun) -> list[str]:
    """Return the fault of an exhibit among those of its neighbours, in alphabetical order."""
    at = BROKEN_RUNS.index(run)
    faults = dict.fromkeys(map(fault_of, (*BROKEN_RUNS[at:], *BROKEN_RUNS[:at])))
    return sorted(list(faults)[:N_CHOICES])


async def ask_fault(app: Any, exhibit: object) -> None:
    """Ask for the fault of the exhibit that a trace describes, and keep that it is solved.

    Raises `UsageError` for an exhibit that this version does not have.
    """
    if not isinstance(exhibit, Mapping) or exhibit.get("repaired"):
        app.notify("This trace is no exhibit of the museum: there is no question to answer.")
        return
    run = find_broken_run(str(exhibit.get("name")))
    options = [(fault, fault) for fault in faults_to_choose(run)]
    chosen = await ask_choice(app, f"{run.question}\nWhat is the fault?", options)
    if chosen == fault_of(run):
        n_solved = add_solved_exhibit(run.name)
        progress = f"{n_solved} of {len(BROKEN_RUNS)} exhibits solved."
        app.notify(f"Right. {run.answer} {progress}", timeout=30)
    elif chosen is not None:
        key = app.keys_of(f"panel.show-{panel_number(run.panel)}")
        place = f"look at the {run.panel} panel ({key}) at step {run.step}"
        again = f"press {app.keys_of('exhibit.answer')} again"
        app.notify(f"That is not it: {place}, and {again}.", severity="warning", timeout=15)
