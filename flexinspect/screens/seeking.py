"""A screen that goes to a step by its number or word, and to tokens by a search."""

from __future__ import annotations

from textual import work

from flexinspect.errors import FlexInspectError
from flexinspect.feed import RunStatus
from flexinspect.panels.base import Navigate
from flexinspect.screens.ask import TextDialog
from flexinspect.screens.commanding import ControlScreen
from flexinspect.screens.search import find_token, parse_step
from flexinspect.text import escape_unprintable


class SearchScreen(ControlScreen):
    """What the keys of searching do; the screen below it says where the user is."""

    status: RunStatus
    _search = ""
    _last_error = ""

    def show_error(self, error: FlexInspectError) -> None:
        """Show an error, once while it stays the same."""
        if self._last_error != error.message:
            self._last_error = error.message
            self.notify(error.sentence(), severity="error", markup=False, timeout=20)

    @work
    async def ask_step(self) -> None:
        """Ask for a step by its number, its name, or a word of its token."""
        first, last = self.status.first_step, self.status.last_step or 0
        question = f"Go to a step ({first} to {last}), or to the token that holds"
        example = "12, first, last, prefill, or a word"
        answer = await self.app.push_screen_wait(TextDialog(question, placeholder=example))
        if not answer:
            return
        step = parse_step(answer, self.status.first_step, self.status.last_step or 0)
        if step is None:
            self._go_to_match(answer, only_generated=True)
            return
        self.navigate(Navigate(step=step))
        if self.place.step != step:
            there = f"There is no step {step}; this is the nearest one."
            self.notify(there, severity="warning", markup=False)

    @work
    async def ask_search(self) -> None:
        """Ask for a text, and go to the next token that holds it."""
        question = "Search the tokens (* goes to the next match)"
        answer = await self.app.push_screen_wait(TextDialog(question, self._search))
        if answer:
            self._search = answer
            self.next_match()

    def next_match(self) -> None:
        """Go to the next match of the search."""
        if not self._search:
            self.ask_search()
            return
        self._go_to_match(self._search)

    def _go_to_match(self, text: str, *, only_generated: bool = False) -> None:
        """Go to the next token that holds the text, from the current one on."""
        reader = self.reader
        if reader is None:
            return
        try:
            target = find_token(reader, self.place, text, only_generated=only_generated)
        except FlexInspectError as error:
            self.show_error(error)
            return
        if target is None:
            self.notify(
                f"No token holds “{escape_unprintable(text)}”.", severity="warning", markup=False
            )
        else:
            self.navigate(target)
