"""Navigation by the number or name of a step and by a search of tokens; limits of places."""

from __future__ import annotations

from dataclasses import replace

from textual import work

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.token_window import current_pos
from flexinspect.trace.queries.search_queries import find_text
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.screens.capture_control import ControlScreen
from flexinspect.tui.screens.dialogs import TextDialog
from flexinspect.tui.trace_session import RunStatus


class SearchScreen(ControlScreen):
    """The actions of search. `TraceScreen`, its subclass, keeps the current place."""

    status: RunStatus
    _search = ""
    _last_error = ""

    def show_error(self, error: FlexInspectError) -> None:
        """Show an error, unless it is the same as the last one."""
        if self._last_error != error.message:
            self._last_error = error.message
            self.notify(error.sentence(), severity="error", markup=False, timeout=20)

    @work
    async def ask_step(self) -> None:
        """Ask for a step by its number, its name, or a word of its token."""
        first, last = self.status.first_step, self.status.last_step or 0
        question = f"Go to a step ({first} to {last}), or to the next token that contains"
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
            message = f"There is no step {step}; this is the nearest one."
            self.notify(message, severity="warning", markup=False)

    @work
    async def ask_search(self) -> None:
        """Ask for a text, and go to the next token that contains it."""
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
        """Go to the next token that contains the text, after the current one."""
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
                f"No token contains “{escape_unprintable(text)}”.", severity="warning", markup=False
            )
        else:
            self.navigate(target)


def parse_step_number(text: str) -> int | None:
    """Return the number that was typed, None for a word (or a number too large for a step)."""
    typed = text.strip()
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 16 else None


def parse_step(text: str, first: int, last: int) -> int | None:
    """Return the step that was typed: a number, `first`, `last` or `prefill`; None for a word."""
    names = {"first": first, "last": last, "prefill": 0}
    return names.get(text.strip().lower(), parse_step_number(text))


def find_token(
    reader: TraceReader, place: TracePlace, text: str, *, only_generated: bool
) -> Navigate | None:
    """Return the next token after a place that contains `text`, wrapping around at the end.

    A token of the prompt belongs to step 0 and is selected by its position.
    """
    current = current_pos(reader, place)
    match = find_text(
        *(reader, text, place.generation, place.branch),
        after=-1 if current is None else current,
        only_generated=only_generated,
    )
    if match is None:
        return None
    pos, step = match
    return Navigate(step=0, pos=pos) if step is None else Navigate(step=step)


def clamp_place(place: TracePlace, status: RunStatus) -> TracePlace:
    """Return the nearest place that the trace has: its step, layer and head."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    last = status.last_step
    step = max(place.step, 0) if last is None else min(max(place.step, status.first_step), last)
    return replace(
        place,
        step=step,
        layer=_clamp_index(place.layer, model.get("layers")),
        head=_clamp_index(place.head, model.get("heads")),
    )


def extrapolate_place(old: TracePlace, new: TracePlace) -> TracePlace | None:
    """Return the place after `new` if the user keeps moving as from `old`; None if unknown."""
    if (old.generation, old.branch) != (new.generation, new.branch):
        return None
    return replace(
        new,
        step=2 * new.step - old.step,
        layer=2 * new.layer - old.layer,
        head=2 * new.head - old.head,
    )


def _clamp_index(value: int, count: object) -> int:
    return max(0, min(value, count - 1)) if isinstance(count, int) and count > 0 else max(value, 0)
