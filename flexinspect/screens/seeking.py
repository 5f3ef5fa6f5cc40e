"""A screen that goes to a step by its number or word, and to tokens by a search."""

from __future__ import annotations

from textual import work

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Status
from flexinspect.panels.base import Go
from flexinspect.screens.ask import Ask
from flexinspect.screens.commanding import CommandingScreen
from flexinspect.screens.search import named_step, token_with
from flexinspect.text import visible


class SeekingScreen(CommandingScreen):
    """What the keys of searching do; the screen below it says where the user is."""

    status: Status
    _search = ""
    _complaint = ""

    def complain(self, error: FlexInspectError) -> None:
        """Show an error, once while it stays the same."""
        if self._complaint != error.message:
            self._complaint = error.message
            self.notify(error.sentence(), severity="error", markup=False, timeout=20)

    @work
    async def ask_step(self) -> None:
        """Ask for a step by its number, its name, or a word of its token."""
        first, last = self.status.first_step, self.status.last_step or 0
        question = f"Go to a step ({first} to {last}), or to the token that holds"
        example = "12, first, last, prefill, or a word"
        answer = await self.app.push_screen_wait(Ask(question, placeholder=example))
        if not answer:
            return
        step = named_step(answer, self.status.first_step, self.status.last_step or 0)
        if step is None:
            self._find(answer, only_generated=True)
            return
        self.go(Go(step=step))
        if self.place.step != step:
            there = f"There is no step {step}; this is the nearest one."
            self.notify(there, severity="warning", markup=False)

    @work
    async def ask_search(self) -> None:
        """Ask for a text, and go to the next token that holds it."""
        question = "Search the tokens (* goes to the next match)"
        answer = await self.app.push_screen_wait(Ask(question, self._search))
        if answer:
            self._search = answer
            self.next_match()

    def next_match(self) -> None:
        """Go to the next match of the search."""
        if not self._search:
            self.ask_search()
            return
        self._find(self._search)

    def _find(self, text: str, *, only_generated: bool = False) -> None:
        """Go to the next token that holds the text, from the current one on."""
        reader = self.reader
        if reader is None:
            return
        try:
            go = token_with(reader, self.place, text, only_generated=only_generated)
        except FlexInspectError as error:
            self.complain(error)
            return
        if go is None:
            self.notify(f"No token holds “{visible(text)}”.", severity="warning", markup=False)
        else:
            self.go(go)
