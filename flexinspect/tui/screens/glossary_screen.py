"""The screen of the glossary: a search line above the terms that it finds."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from flexinspect.core.glossary_terms import TOPICS, search_glossary

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
