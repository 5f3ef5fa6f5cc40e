"""A window over a screen with paragraphs to read: a finding, or the messages so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from flexinspect.core.text import escape_unprintable

Paragraph = tuple[str, str]
"""A heading, which may be empty, and a text."""


class TextScreen(ModalScreen[str | None]):
    """Shows paragraphs, which scroll; Escape returns None.

    `keys` maps Textual's names of further keys that close it to what it returns for them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "close")]

    def __init__(
        self, title: str, paragraphs: Sequence[Paragraph], keys: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._title, self._paragraphs = title, paragraphs
        for name, answer in (keys or {}).items():
            self._bindings.bind(name, f"dismiss('{answer}')")

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="window help"):
            yield Static(Content.styled(self._title, "bold"), markup=False, classes="helpline")
            for heading, text in self._paragraphs:
                content = Content(escape_lines(text))
                if heading:
                    content = Content.assemble((f"{heading}: ", "bold"), content)
                yield Static(content, markup=False, classes="helpline")


def escape_lines(text: str) -> str:
    """Return a text without control characters, except its line breaks."""
    return "\n".join(map(escape_unprintable, text.split("\n")))
