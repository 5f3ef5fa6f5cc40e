"""Dialogs over a screen: text input, choice from a list, help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable

T = TypeVar("T")


class Dialog(ModalScreen[str | None]):
    """A dialog with a result; Escape returns None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def on_mount(self) -> None:
        """Remove notifications, which could cover the dialog."""
        self.app.clear_notifications()


class TextDialog(Dialog):
    """Asks for a line of text."""

    def __init__(self, question: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._question, self._value, self._placeholder = question, value, placeholder

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield Input(self._value, placeholder=self._placeholder, select_on_focus=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class ChoiceDialog(Dialog):
    """Asks for one of a list of (id, line)."""

    def __init__(self, question: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question, self._options = question, options

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield OptionList(*(Option(Content(text), id=name) for name, text in self._options))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


async def ask_text(
    app: App[Any], question: str, value: str = "", *, placeholder: str = ""
) -> str | None:
    """Ask for a line of text; None when cancelled."""
    return await app.push_screen_wait(TextDialog(question, value, placeholder))


async def ask_choice(
    app: App[Any], question: str, options: Sequence[tuple[str, str]]
) -> str | None:
    """Ask for one of a list of (id, line), and return its id; None when cancelled."""
    return await app.push_screen_wait(ChoiceDialog(question, options))


async def call_in_thread(app: App[Any], call: Callable[[], T]) -> T | None:
    """Return the result of a call that may block; show its `FlexInspectError` and return None."""
    try:
        return await asyncio.to_thread(call)
    except FlexInspectError as error:
        app.notify(format_error(error), severity="error", timeout=10)
        return None


def format_error(error: FlexInspectError) -> str:
    """Return the message of an error, with its hint on its own line."""
    return "\n".join(map(escape_unprintable, filter(None, (error.message, error.hint))))


class HelpScreen(ModalScreen[None]):
    """Help: what the panel shows and how to read it, then all keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, title: str, lines: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._lines, self._keys = title, lines, keys

    def compose(self) -> ComposeResult:
        width = max((len(names) for names, _ in self._keys), default=0)
        table = "\n".join(f"{names:>{width}}  {text}" for names, text in self._keys)
        with VerticalScroll(classes="window help"):
            yield Static(Content.styled(self._title, "bold"), markup=False)
            for text in self._lines:
                yield Static(Content(text), markup=False, classes="helpline")
            yield Static(Content(table), markup=False)
