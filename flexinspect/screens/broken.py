"""The screen for a trace that cannot be read: why, what to do, what else there is."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.errors import TraceError
from flexinspect.screens.start import Begin
from flexinspect.state import known_traces
from flexinspect.text import visible
from flexinspect.trace.salvage import forget, mended, what_is_left


class BrokenScreen(Screen[None]):
    """Says what is wrong with a file, what can still be read of it, and offers other traces."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape", "app.quit", "quit")]

    def __init__(self, path: Path, error: TraceError, begin: Begin) -> None:
        super().__init__()
        self._path, self._error, self._begin = path, error, begin
        self._copy = mended(path)
        mine = path.absolute()
        self._others = [other for other in known_traces(mine.parent) if other != mine]

    def compose(self) -> ComposeResult:
        """The sentence, what is left, the other traces."""
        with Vertical(id="broken"):
            yield Static(Content.styled("This trace cannot be opened", "bold $error"))
            yield Static(Content(f"\n{visible(self._error.message)}"), id="why")
            if self._error.hint:
                yield Static(Content(visible(self._error.hint)), id="hint")
            left = what_is_left(self._copy or self._path)
            yield Static(Content("\n".join(["", *left, ""])), id="left")
            if options := self._options():
                yield OptionList(*options)
        yield Footer(show_command_palette=False)

    def _options(self) -> list[Option]:
        options = [Option(Content(f"Open {visible(str(path))}")) for path in self._others]
        if self._copy is not None:
            options.insert(0, Option(Content("Open what is left of it, as a copy"), id="copy"))
        return options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the copy, or another trace."""
        if event.option.id == "copy" and self._copy is not None:
            self._begin(self._copy)
        else:
            self._begin(self._others[event.option_index - (self._copy is not None)])

    def on_unmount(self) -> None:
        """Remove the copy."""
        if self._copy is not None:
            forget(self._copy)
