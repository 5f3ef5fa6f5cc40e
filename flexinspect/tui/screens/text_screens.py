"""Windows over a screen with texts to read: a finding, the messages so far, the glossary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from flexinspect.core.glossary_terms import TOPICS, search_glossary
from flexinspect.core.text import escape_unprintable

Paragraph = tuple[str, str]
"""A heading, which may be empty, and a text."""


class TextScreen(ModalScreen[str | None]):
    """Shows paragraphs, which scroll; Escape returns None.

    `keys` maps Textual's names of further keys that close it to what it returns for them; `labels`
    name them in the lower border.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "close")]

    def __init__(
        self,
        title: str,
        paragraphs: Sequence[Paragraph],
        keys: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._title, self._paragraphs = title, paragraphs
        self._subtitle = " · ".join(["↑ ↓ scroll", *labels, "esc close"])
        for name, answer in (keys or {}).items():
            self._bindings.bind(name, f"dismiss('{answer}')")

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="window help") as window:
            window.border_subtitle = self._subtitle
            yield Static(Content.styled(self._title, "bold"), markup=False, classes="helpline")
            for heading, text in self._paragraphs:
                content = Content(escape_lines(text))
                if heading:
                    content = Content.assemble((f"{heading}: ", "bold"), content)
                yield Static(content, markup=False, classes="helpline")


def escape_lines(text: str) -> str:
    """Return a text without control characters, except its line breaks."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


# -- the glossary ---------------------------------------------------------------------------------

_SCROLL_KEYS = ("up", "down", "pageup", "pagedown")


class GlossaryScreen(ModalScreen[None]):
    """Explains the words of the interface. Typing searches, the arrows scroll, Escape closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "close"),
        *(Binding(key, f"move('{key.replace('page', 'page_')}')") for key in _SCROLL_KEYS),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="window glossary") as window:
            window.border_title = "Glossary"
            window.border_subtitle = "type to search · ↑ ↓ scroll · esc close"
            yield Input(placeholder="a word, for example: margin", compact=True)
            with VerticalScroll(can_focus=False):
                yield Static(_format_terms(""), id="terms")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show what the typed text finds."""
        self.query_one("#terms", Static).update(_format_terms(event.value))
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def action_move(self, how: str) -> None:
        """Scroll the terms; `how` is up, down, page_up or page_down."""
        getattr(self.query_one(VerticalScroll), f"scroll_{how}")(animate=False)


def _format_terms(query: str) -> Content:
    terms = search_glossary(query)
    if not terms:
        return Content("No term has this word. Try a shorter one.")
    paragraphs = []
    topic = ""
    for term in terms:
        if not query and term.topic != topic:
            topic = term.topic
            paragraphs.append(Content.styled(TOPICS[topic], "bold underline"))
        also = f"  {', '.join(term.also)}" if term.also else ""
        name = (term.name, "bold $text-accent")
        paragraphs.append(Content.assemble(name, (also, "dim"), "\n", term.text))
    return Content("\n\n").join(paragraphs)
