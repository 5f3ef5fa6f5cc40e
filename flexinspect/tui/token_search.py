"""Search: a step by its number or its token, a token by its text, and the next match."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial

from flexinspect.core.conversion import parse_step_number
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.token_window import current_pos
from flexinspect.trace.queries import find_text
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.navigation import Navigation, PlacedScreen
from flexinspect.tui.screens.dialogs import ask_text, call_in_thread

MAX_SEARCHES = 2
"""Searches at a time: one that runs, and one that waits for it."""


def parse_step(text: str, first: int, last: int) -> int | None:
    """Return the step that was typed: a number, `first`, `last` or `prefill`; None for a word."""
    names = {"first": first, "last": last, "prefill": 0}
    return names.get(text.strip().lower(), parse_step_number(text))


def find_token(
    reader: TraceReader,
    place: TracePlace,
    text: str,
    *,
    only_generated: bool,
    is_next: bool = False,
) -> Navigate | None:
    """Return the next token after a place at which `text` begins.

    It is searched in the whole branch of the place, then in the other generations. The next match
    (`is_next`) is searched in reading order instead: to the end of the branch, in the generations
    that follow, and at last in the beginning of the branch. A token of the prompt belongs to step 0
    and is selected by its position.
    """
    current = current_pos(reader, place)
    numbers = [row.generation for row in reader.generations()]
    others = [number for number in numbers if number > place.generation]
    others += [number for number in numbers if number < place.generation]
    here = (place.generation, place.branch)
    parts = [(*here, -1 if current is None else current)]
    parts += [] if is_next else [(*here, -1)]
    parts += [(number, 0, -1) for number in others]
    parts += [(*here, -1)] if is_next else []
    for generation, branch, after in parts:
        match = find_text(
            *(reader, text, generation, branch), after=after, only_generated=only_generated
        )
        if match is not None:
            pos, step = match
            at = (generation, branch, step or 0)
            return Navigate(*at, pos=pos if step is None else None)
    return None


class TokenSearch:
    """Asks what to search, and goes to its matches."""

    def __init__(self, screen: PlacedScreen, navigation: Navigation) -> None:
        self._screen, self._navigation = screen, navigation
        self._text = ""
        self._lock, self._n_searches = asyncio.Lock(), 0

    async def ask_step(self) -> None:
        """Ask for a step by its number, its name, or a word of its token."""
        screen = self._screen
        first, last = screen.status.first_step, screen.status.last_step or 0
        question = f"Go to a step ({first} to {last}), or to the next token that contains"
        example = "12, first, last, prefill, or a word"
        answer = await ask_text(screen.app, question, placeholder=example)
        if not answer:
            return
        step = parse_step(answer, first, last)
        if step is None:
            await self._go_to_match(answer, only_generated=True)
            return
        self._navigation.jump(Navigate(step=step))
        if screen.place.step != step:
            message = f"Step {step} does not exist; the nearest step is shown."
            screen.app.notify(message, severity="warning")

    async def ask_search(self) -> None:
        """Ask for a text, and go to the next token that contains it."""
        question = "Search the tokens (* goes to the next match)"
        answer = await ask_text(self._screen.app, question, self._text)
        if answer:
            self._text = answer
            await self._go_to_match(answer)

    def next_match(self) -> Awaitable[None]:
        """Go to the next match of the search; without a search ask for one."""
        return self._go_to_match(self._text, is_next=True) if self._text else self.ask_search()

    async def _go_to_match(
        self, text: str, *, only_generated: bool = False, is_next: bool = False
    ) -> None:
        """Go to the next token at which the text begins; see `find_token`.

        The next search begins where the one before has ended; more than that one do not wait.
        """
        if self._n_searches >= MAX_SEARCHES:
            return
        self._n_searches += 1
        try:
            async with self._lock:
                screen, reader, place = self._screen, self._screen.reader, self._screen.place
                if reader is None:
                    return
                find = partial(find_token, only_generated=only_generated, is_next=is_next)
                found = await call_in_thread(screen.app, lambda: (find(reader, place, text),))
                if found is not None:
                    self._show_match(text, *found, only_generated=only_generated)
        finally:
            self._n_searches -= 1

    def _show_match(self, text: str, target: Navigate | None, *, only_generated: bool) -> None:
        if target is None:
            where = "generated text" if only_generated else "text"
            message = f"No {where} contains “{escape_unprintable(text)}”."
            self._screen.app.notify(message, severity="warning")
        else:
            self._navigation.jump(target)
