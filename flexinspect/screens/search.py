"""Going to a step by its number, or to a token by a part of its text."""

from __future__ import annotations

from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.parts.sequence import current_pos
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.sequences import find_text


def parse_step_number(text: str) -> int | None:
    """Return the number that was typed, None for a word (or a number beyond any step)."""
    typed = text.strip()
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 16 else None


def parse_step(text: str, first: int, last: int) -> int | None:
    """Return the step that was typed: a number, `first`, `last` or `prefill`; None for a word."""
    names = {"first": first, "last": last, "prefill": 0}
    return names.get(text.strip().lower(), parse_step_number(text))


def find_token(
    reader: TraceReader, place: TracePlace, text: str, *, only_generated: bool
) -> Navigate | None:
    """Return the way to the next token after a place that holds `text`, round the end.

    A token of the prompt belongs to the first step, and is looked at by its position.
    """
    here = current_pos(reader, place)
    found = find_text(
        *(reader, text, place.generation, place.branch),
        after=-1 if here is None else here,
        only_generated=only_generated,
    )
    if found is None:
        return None
    pos, step = found
    return Navigate(step=0, pos=pos) if step is None else Navigate(step=step)
