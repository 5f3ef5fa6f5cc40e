"""The dialog of an exhibit of the museum: its question, while its trace is built."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

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
from flexinspect.inputs.broken_run_catalog import BrokenRun, exhibit_path


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
