"""Places to go to: the step or token that was typed, the next place, the limits of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider

from flexinspect.core.keyboard import all_keys
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.panel_registry import panel_names
from flexinspect.panels.token_window import current_pos
from flexinspect.trace.queries import find_text
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.trace_session import RunStatus


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


def bindings() -> list[BindingType]:
    """Return the table of keys as Textual's bindings."""
    return [
        Binding(
            ",".join(key.keys),
            f"do('{key.id}')",
            key.label or key.text,
            show=bool(key.label),
            id=key.id,
            tooltip=key.text,
        )
        for key in all_keys()
    ]


class KeyCommands(Provider):
    """The actions of the keys as commands of the palette."""

    def _key_commands(self) -> Iterator[tuple[str, str | None, Callable[[], None]]]:
        screen: Any = self.screen
        for key in all_keys():
            yield key.text[:1].upper() + key.text[1:], key.id, partial(screen.action_do, key.id)

    async def discover(self) -> Hits:
        """List all actions."""
        for text, id_, command in self._key_commands():
            yield DiscoveryHit(text, command, help=id_)

    async def search(self, query: str) -> Hits:
        """Match the descriptions of actions and the names of panels; a number is a step."""
        screen: Any = self.screen
        matcher = self.matcher(query)
        if (step := parse_step_number(query)) is not None:
            yield Hit(1.0, f"Go to step {step}", partial(screen.navigate, Navigate(step=step)))
        commands = [*self._key_commands()]
        for name in panel_names():
            target = partial(screen.navigate, Navigate(panel=name))
            commands.append((f"Show panel {name}", None, target))
        for text, id_, command in commands:
            if (score := matcher.match(text)) > 0:
                yield Hit(score, matcher.highlight(text), command, help=id_)
