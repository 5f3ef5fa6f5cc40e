"""Small windows over a screen: ask for a word, ask yes or no, choose one of a list, help."""

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
    """A window that asks; Escape gives None. What was said before it does not hide it."""

    def on_mount(self) -> None:
        """Take away what pops up over the lower right, where the answers may lie."""
        self.app.clear_notifications()


class TextDialog(Dialog):
    """One line of text; Escape gives None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._question, self._value, self._placeholder = question, value, placeholder

    def compose(self) -> ComposeResult:
        """The question above, the answer below."""
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield Input(self._value, placeholder=self._placeholder, select_on_focus=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter answers."""
        self.dismiss(event.value)


class ChoiceDialog(Dialog):
    """One of a list of (id, line); Escape gives None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question, self._options = question, options

    def compose(self) -> ComposeResult:
        """The question above, the list below."""
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield OptionList(*(Option(Content(text), id=name) for name, text in self._options))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click answers."""
        self.dismiss(event.option.id)


class HelpScreen(ModalScreen[None]):
    """What the panel shows and how to read it, then all keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, title: str, lines: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._lines, self._keys = title, lines, keys

    def compose(self) -> ComposeResult:
        """The panel's three lines, then the table."""
        width = max((len(names) for names, _ in self._keys), default=0)
        table = "\n".join(f"{names:>{width}}  {text}" for names, text in self._keys)
        with VerticalScroll(classes="window help"):
            yield Static(Content.styled(self._title, "bold"), markup=False)
            for text in self._lines:
                yield Static(Content(text), markup=False, classes="helpline")
            yield Static(Content(table), markup=False)
