"""The screen for a trace that cannot be read: why, what to do, what else there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import Worker, WorkerState

from flexinspect.errors import TraceError
from flexinspect.screens.start import OpenTarget
from flexinspect.state import known_traces
from flexinspect.text import escape_unprintable
from flexinspect.trace.salvage import (
    delete_repaired_copy,
    describe_readable,
    is_repairable,
    repair_copy,
)


class UnreadableTraceScreen(Screen[None]):
    """Says what is wrong with a file, what can still be read of it, and offers other traces.

    What is left is counted, and a copy made if it is asked for, in threads.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "app.quit", "quit")]

    def __init__(self, path: Path, error: TraceError, open_target: OpenTarget) -> None:
        super().__init__()
        self._path, self._error, self._open_target = path, error, open_target
        self._offers_copy = is_repairable(path)
        self._copy: Path | None = None
        self._is_copying = self._is_closed = False
        mine = path.absolute()
        self._others = [other for other in known_traces(mine.parent) if other != mine]

    def compose(self) -> ComposeResult:
        """The sentence, what is left once it is known, the other traces."""
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
        """Begin to look for what is left."""
        self.query_one("#copying").display = False
        inspect_file = partial(describe_readable, self._path)
        self.run_worker(inspect_file, name="left", thread=True, exit_on_error=False)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Say what is left; open the copy."""
        if event.state not in (WorkerState.SUCCESS, WorkerState.ERROR):
            return
        result = event.worker.result if event.state is WorkerState.SUCCESS else None
        if event.worker.name == "left":
            left = result if isinstance(result, list) else ["What is left of it is not known."]
            self.query_one("#left", Static).update(Content("\n".join(["", *left, ""])))
        elif event.worker.name == "copy":
            self._is_copying = False
            self._show_message(
                "No copy could be made: is there room in the folder for temporary files?\n"
            )
            if self._copy is not None:
                self._show_message("")
                self._open_target(self._copy)

    def _options(self) -> list[Option]:
        options = [
            Option(Content(f"Open {escape_unprintable(str(path))}")) for path in self._others
        ]
        if self._offers_copy:
            options.insert(0, Option(Content("Open what is left of it, as a copy"), id="copy"))
        return options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open a copy, which is made first, or another trace."""
        if event.option.id != "copy":
            self._open_target(self._others[event.option_index - self._offers_copy])
        elif self._copy is not None:
            self._open_target(self._copy)
        elif not self._is_copying:
            self._is_copying = True
            self._show_message("Copying what is left …\n")
            self.run_worker(self._make_copy, name="copy", thread=True, exit_on_error=False)

    def _show_message(self, text: str) -> None:
        message = self.query_one("#copying", Static)
        message.update(Content(text))
        message.display = bool(text)

    def _make_copy(self) -> None:
        """Make the copy, in a thread; whoever comes last, this or the end, removes it."""
        self._copy = repair_copy(self._path, lambda: self._is_closed)
        if self._is_closed:
            self._remove_copy()

    def on_unmount(self) -> None:
        """Remove the copy, and end one that is being made."""
        self._is_closed = True
        self._remove_copy()

    def _remove_copy(self) -> None:
        if self._copy is not None:
            delete_repaired_copy(self._copy)
