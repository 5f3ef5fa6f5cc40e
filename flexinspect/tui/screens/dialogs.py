"""Dialogs over a screen: text input, choice from a list, help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option


class Dialog(ModalScreen[str | None]):
    """A dialog with a result; Escape returns None."""

    def on_mount(self) -> None:
        """Remove notifications, which could cover the dialog."""
        self.app.clear_notifications()


class TextDialog(Dialog):
    """Asks for a line of text; Escape returns None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._question, self._value, self._placeholder = question, value, placeholder

    def compose(self) -> ComposeResult:
        """Yield the question and the input."""
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield Input(self._value, placeholder=self._placeholder, select_on_focus=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return the text on Enter."""
        self.dismiss(event.value)


class ChoiceDialog(Dialog):
    """Asks for one of a list of (id, line); Escape returns None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question, self._options = question, options

    def compose(self) -> ComposeResult:
        """Yield the question and the list."""
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield OptionList(*(Option(Content(text), id=name) for name, text in self._options))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the id of the chosen line on Enter or a click."""
        self.dismiss(event.option.id)


class HelpScreen(ModalScreen[None]):
    """Help: what the panel shows and how to read it, then all keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, title: str, lines: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._lines, self._keys = title, lines, keys

    def compose(self) -> ComposeResult:
        """Yield the help of the panel and the table of keys."""
        width = max((len(names) for names, _ in self._keys), default=0)
        table = "\n".join(f"{names:>{width}}  {text}" for names, text in self._keys)
        with VerticalScroll(classes="window help"):
            yield Static(Content.styled(self._title, "bold"), markup=False)
            for text in self._lines:
                yield Static(Content(text), markup=False, classes="helpline")
            yield Static(Content(table), markup=False)
